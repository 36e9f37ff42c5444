# SPDX-License-Identifier: Apache-2.0
"""The directory of the JIT cache.

It is chosen and made when it is first needed: ``PRECAST_CACHE_DIR``, else the user cache directory
of the platform, else, where that cannot be written, a private temporary directory, which the log
names once.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import shutil
import tempfile
from pathlib import Path

from precast._base import env as _env
from precast._base.errors import CacheDirectoryError
from precast._base.trust import own_folder
from precast._base.version import __version__
from precast._plan.compilation_context import CompilationContext

#: Version of the layout. A new layout gets a new number, and the old folders stay as they are.
CACHE_LAYOUT = "v1"


def cache_dir() -> Path:
    """The directory of the JIT cache, for reading. It need not exist yet.

    Raises
    ------
    CacheDirectoryError
        If ``PRECAST_CACHE_DIR`` names the home of a user who does not exist.
    """
    override = _env.CACHE_DIR()
    if override:
        try:
            return Path(override).expanduser().absolute() / CACHE_LAYOUT
        except RuntimeError as error:
            raise CacheDirectoryError(
                f"PRECAST_CACHE_DIR={override}: {error} Fix: set an absolute path"
            ) from None
    return _default_cache_dir() / CACHE_LAYOUT


def cache_dirs() -> list[Path]:
    """Directories with builds of this user: :func:`cache_dir`, and a temporary replacement."""
    replaced = [] if _env.CACHE_DIR() else [path / CACHE_LAYOUT for path in _temporary.values()]
    return [cache_dir(), *replaced]


def workspace_dir() -> Path:
    """A path whose last two parts are the version and the targets of this process.

    FlashInfer keeps its builds at such a path. Engines take the two names for paths of their own;
    precast keeps nothing there.
    """
    targets = "_".join(f"{a}{b}" for a, b in sorted(CompilationContext().TARGET_CUDA_ARCHS))
    return cache_dir() / __version__ / (targets or "none")


def writable_cache_dir() -> Path:
    """:func:`cache_dir`, made if it is missing.

    Raises
    ------
    CacheDirectoryError
        If ``PRECAST_CACHE_DIR`` names a directory that cannot be written.
    """
    path = cache_dir()
    try:
        _make_private(path)
    except OSError as error:
        if not _env.CACHE_DIR():  # The default directory may have become read-only.
            path = _temporary_cache_dir(str(path)) / CACHE_LAYOUT
            _make_private(path)
            return path
        raise CacheDirectoryError(
            f"PRECAST_CACHE_DIR={_env.CACHE_DIR()} cannot be written ({error.strerror}). Nothing "
            f"was compiled. Fix: point it to a directory of yours on a writable file system, or "
            f"install the prebuilt modules (see: precast doctor)"
        ) from error
    return path


def _make_private(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own_folder(path)
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@functools.cache
def _default_cache_dir() -> Path:
    import platformdirs

    try:
        return Path(platformdirs.user_cache_dir("precast", appauthor=False))
    except RuntimeError:  # The user has neither HOME nor an entry in passwd.
        return Path(os.devnull, "no home directory")  # Nothing can be made there.


#: The folder of each process; a forked child makes its own.
_temporary: dict[int, Path] = {}


def _temporary_cache_dir(unwritable: str) -> Path:
    """A private folder of this process, which is removed when the process ends."""
    from precast._base.log import get_logger

    pid = os.getpid()
    if pid in _temporary:
        return _temporary[pid]
    path = _temporary[pid] = Path(tempfile.mkdtemp(prefix="precast-cache-"))
    atexit.register(_remove_own, path, pid)
    get_logger().warning(
        "the cache directory %s cannot be written; modules compiled by this process go to %s and "
        "are deleted when it ends. Fix: set PRECAST_CACHE_DIR to a directory of yours",
        unwritable,
        path,
    )
    return path


def _remove_own(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
