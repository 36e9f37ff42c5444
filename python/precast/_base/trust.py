# SPDX-License-Identifier: Apache-2.0
"""Whether a file may be loaded as code: who could have written it, and whether it was changed."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from precast._base.files import Identity, identity, read_regular
from precast._base.shared_object import defect

#: As many symbolic links as Linux follows in one path.
_MAX_LINKS = 40


def trust_problem(library: Path, record: Path, must_be_own: bool) -> str | None:
    """Why ``library`` must not be loaded, or None.

    Everything on the way to a file is looked at, symbolic links and what they lead to included: no
    folder may be world-writable, unless it is sticky and what is taken from it belongs to a trusted
    user. Those are root, this user, and the owner of precast's own files, who could change precast
    itself. Group-writable places are trusted.

    Parameters
    ----------
    library : Path
        A shared library. It, its folder and the folder above must belong to a trusted user.
    record : Path
        The file that records the digest of ``library``: ``manifest.json`` or ``meta.json``.
    must_be_own : bool
        True in the user's JIT cache, where both files and their folders must belong to this user
        and none is a symbolic link.
    """
    places = dict.fromkeys((library, library.parent, record, record.parent))
    try:
        problems = [
            *(_owner_problem(place, must_be_own) for place in places),
            *(_way_problem(file) for file in (library, record)),
        ]
        return next(filter(None, problems), None)
    except OSError as error:
        return f"{error.filename or library} cannot be read ({error.strerror})"


def _way_problem(path: Path) -> str | None:
    """Why anybody could change what ``path`` leads to."""
    for place in _way(path):
        status = place.lstat()
        # Such a folder is sticky, as was checked before: only owners replace what lies in it.
        if place.parent.lstat().st_mode & stat.S_IWOTH and status.st_uid not in trusted_users():
            return (
                f"{place} belongs to user {status.st_uid}, and {place.parent} is world-writable. "
                f"Fix: use a folder that only you can write"
            )
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        is_link = stat.S_ISLNK(status.st_mode)
        if status.st_mode & stat.S_IWOTH and not (is_link or is_sticky):
            return f"{place} is world-writable. Fix: chmod o-w {place}"
    return None


def _way(path: Path) -> Iterator[Path]:
    """Every folder, link and file on the way to ``path``; no folder above one of them is a link."""
    waiting = [*reversed(path.absolute().parts[1:])]
    here, links = Path("/"), 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            here = here.parent
            continue
        here = here / part
        yield here
        if here.is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = here.readlink()
            here = Path("/") if target.is_absolute() else here.parent
            waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _owner_problem(place: Path, must_be_own: bool) -> str | None:
    status = place.lstat() if must_be_own else place.stat()
    if must_be_own and stat.S_ISLNK(status.st_mode):
        return f"{place} is a symbolic link, which the cache never holds. Fix: remove it"
    if must_be_own and status.st_uid != os.geteuid():
        return (
            f"{place} belongs to user {status.st_uid}, not to this user ({os.geteuid()}). Fix: "
            f"use a cache directory of your own, or ship the modules by PRECAST_PROVIDER_PATH"
        )
    if status.st_uid not in trusted_users():
        names = ", ".join(map(str, sorted(trusted_users())))
        return (
            f"{place} belongs to user {status.st_uid}; trusted are root, this user and the owner "
            f"of precast ({names}). Fix: chown it, or install it as one of them"
        )
    return None


def trusted_users() -> set[int]:
    """Root, this user, and the owner of precast's own files."""
    return {0, os.geteuid(), _owner_of_precast()}


@functools.cache
def _owner_of_precast() -> int:
    return Path(__file__).stat().st_uid


def own_folder(path: Path) -> None:
    """Make a private folder if it is missing.

    Raises
    ------
    OSError
        If it is none, if it is a symbolic link, belongs to somebody else, or can be written by
        others: what is put there could be exchanged.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # Whatever the umask is.
    status = path.lstat()
    problem = None
    if stat.S_ISLNK(status.st_mode):
        problem = "it is a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    elif status.st_uid != os.geteuid():
        problem = f"it belongs to user {status.st_uid}, not to this user ({os.geteuid()})"
    elif status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        problem = f"others can write it; chmod go-w {path}"
    if problem is not None:
        raise PermissionError(errno.EACCES, problem, str(path))


#: The files whose contents were checked, as they were then.
_checked: dict[Path, Identity] = {}


def was_exchanged(library: Path) -> bool:
    """Whether another file is there than the one whose contents were checked."""
    try:
        return library in _checked and _checked[library] != identity(library)
    except OSError:
        return True


def check_contents(
    library: Path,
    size: int,
    sha256: str,
    fix_hint: str,
    exports: Sequence[str] | None = None,
) -> str | None:
    """Why the bytes of ``library`` are not those that were built, or None.

    Parameters
    ----------
    exports : sequence of str, optional
        The functions that it has to have. The record of a prebuilt module may have been made from a
        damaged file. Default: what the file holds is not looked at, for a build of this machine.
    """
    try:
        data, _checked[library] = read_regular(library)
    except OSError as error:
        return f"{library.name} cannot be read ({error.strerror}). Fix: {fix_hint}"
    if len(data) != size:
        return f"{library.name} has {len(data)} bytes instead of {size}: truncated. Fix: {fix_hint}"
    if hashlib.sha256(data).hexdigest() != sha256:
        return f"{library.name} was changed after it was built (sha256 differs). Fix: {fix_hint}"
    problem = None if exports is None else defect(data, exports)
    return problem and f"{library.name} {problem}. Fix: {fix_hint}"


def record_digest(data: bytes) -> str:
    """The digest of a file as ``RECORD`` of a wheel has it, without ``sha256=``."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
