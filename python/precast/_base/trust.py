# SPDX-License-Identifier: Apache-2.0
"""Whether a file may be loaded as code: who could have written it, and whether it was changed."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path


def trust_problem(library: Path, record: Path, must_be_own: bool) -> str | None:
    """Why ``library`` must not be loaded, or None.

    Parameters
    ----------
    library : Path
        A shared library. Its folder and the folder above are checked, too: those of the given path,
        and those of the path without symbolic links.
    record : Path
        The file that records the digest of ``library``: ``manifest.json`` or ``meta.json``.
    must_be_own : bool
        True in the user's JIT cache, where every file must belong to this user and none is a
        symbolic link. Providers and configured folders are trusted unless they are world-writable.
    """
    problem = _weak_place(_places(library, record), must_be_own)
    if problem is None and must_be_own:
        for file in (library, record):
            if file.is_symlink():
                return f"{file} is a symbolic link, which the cache never holds. Fix: remove it"
    return problem or _weak_place(_places(library.resolve(), record.resolve()), must_be_own)


def _places(library: Path, record: Path) -> dict[Path, bool]:
    """Each path to check, and whether it must have the owner that the library must have."""
    owned = (library, library.parent, record, record.parent)
    return {**dict.fromkeys(owned, True), library.parent.parent: False}


def _weak_place(places: dict[Path, bool], must_be_own: bool) -> str | None:
    for place, is_owned in places.items():
        try:
            status = place.stat()
        except OSError as error:
            return f"{place} cannot be read ({error.strerror})"
        if status.st_mode & stat.S_IWOTH:
            return f"{place} is world-writable. Fix: chmod o-w {place}"
        if must_be_own and is_owned and status.st_uid != os.geteuid():
            return (
                f"{place} belongs to user {status.st_uid}, not to this user ({os.geteuid()}). Fix: "
                f"use a cache directory of your own, or ship the modules by PRECAST_PROVIDER_PATH"
            )
    return None


def check_contents(library: Path, size: int, sha256: str, fix_hint: str) -> str | None:
    """Why the bytes of ``library`` are not those that were built, or None."""
    try:
        data = library.read_bytes()
    except OSError as error:
        return f"{library.name} cannot be read ({error.strerror}). Fix: {fix_hint}"
    if len(data) != size:
        return f"{library.name} has {len(data)} bytes instead of {size}: truncated. Fix: {fix_hint}"
    if hashlib.sha256(data).hexdigest() != sha256:
        return f"{library.name} was changed after it was built (sha256 differs). Fix: {fix_hint}"
    return None
