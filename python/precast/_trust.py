# SPDX-License-Identifier: Apache-2.0
"""Whether a file may be loaded as code: nothing that another user could have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def distrust(path: Path, must_be_own: bool) -> str | None:
    """Why ``path`` must not be loaded, or None.

    Parameters
    ----------
    path : Path
        A shared library; its folder and the folder above (the manifest's) are looked at too.
    must_be_own : bool
        True in the user's JIT cache, where all must belong to this user. Providers and configured
        folders are trusted as installed, as long as not everybody can write them.
    """
    path = path.resolve()
    for place in (path, path.parent, path.parent.parent):
        try:
            status = os.stat(place)
        except OSError as error:
            return f"{place} cannot be read ({error.strerror})"
        if status.st_mode & stat.S_IWOTH:
            return f"{place} can be written by everybody. Fix: chmod o-w {place}"
        if must_be_own and place != path.parent.parent and status.st_uid != os.geteuid():
            return (
                f"{place} belongs to user {status.st_uid}, not to this user ({os.geteuid()}). Fix: "
                f"use a cache directory of your own, or ship the modules by PRECAST_PROVIDER_PATH"
            )
    return None
