# SPDX-License-Identifier: Apache-2.0
"""Whether a file may be loaded as code: only this user could write it, and nobody changed it."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path


def distrust(library: Path, record: Path, must_be_own: bool) -> str | None:
    """Why ``library`` must not be loaded, or None.

    Parameters
    ----------
    library : Path
        A shared library; its folder and the folder above are looked at too, both those of the path
        as given and those that its links lead to.
    record : Path
        The file with the digest that ``library`` must have: ``manifest.json`` or ``meta.json``.
    must_be_own : bool
        True in the user's JIT cache, where all must belong to this user and nothing is a link.
        Providers and configured folders are trusted as installed, as long as not everybody can
        write them.
    """
    problem = _weak_place(_places(library, record), must_be_own)
    if problem is None and must_be_own:
        for file in (library, record):
            if file.is_symlink():
                return f"{file} is a symbolic link, which the cache never holds. Fix: remove it"
    return problem or _weak_place(_places(library.resolve(), record.resolve()), must_be_own)


def _places(library: Path, record: Path) -> dict[Path, bool]:
    """What is looked at, and whether it must have the owner that the library must have."""
    owned = (library, library.parent, record, record.parent)
    return {**dict.fromkeys(owned, True), library.parent.parent: False}


def _weak_place(places: dict[Path, bool], must_be_own: bool) -> str | None:
    for place, is_owned in places.items():
        try:
            status = place.stat()
        except OSError as error:
            return f"{place} cannot be read ({error.strerror})"
        if status.st_mode & stat.S_IWOTH:
            return f"{place} can be written by everybody. Fix: chmod o-w {place}"
        if must_be_own and is_owned and status.st_uid != os.geteuid():
            return (
                f"{place} belongs to user {status.st_uid}, not to this user ({os.geteuid()}). Fix: "
                f"use a cache directory of your own, or ship the modules by PRECAST_PROVIDER_PATH"
            )
    return None


def check_contents(library: Path, size: int, sha256: str, mend: str) -> str | None:
    """Why the bytes of ``library`` are not those that were built, or None."""
    try:
        data = library.read_bytes()
    except OSError as error:
        return f"{library.name} cannot be read ({error.strerror}). Fix: {mend}"
    if len(data) != size:
        return f"{library.name} has {len(data)} bytes instead of {size}: truncated. Fix: {mend}"
    if hashlib.sha256(data).hexdigest() != sha256:
        return f"{library.name} was changed after it was built (sha256 differs). Fix: {mend}"
    return None
