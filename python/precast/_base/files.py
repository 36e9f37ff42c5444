# SPDX-License-Identifier: Apache-2.0
"""Read files of places that somebody else may have prepared."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple

#: No file that precast reads whole is larger.
_MOST_BYTES = 1 << 30


class Identity(NamedTuple):
    """What changes when a file is exchanged or written."""

    device: int
    inode: int
    size: int
    modified_ns: int


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises
    ------
    OSError
        If it cannot be read, or is a pipe, a device or a folder: reading a pipe would wait forever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> tuple[bytes, Identity]:
    """Return the bytes of a regular file and its identity.

    Raises
    ------
    OSError
        As :func:`open_regular`, or if it is larger than any file that precast reads whole.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read(_MOST_BYTES), _identity(status)


def path_problem(path: Path) -> str | None:
    """Why tvm-ffi cannot open ``path``, or None."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"{os.fsencode(path)!r} is not UTF-8, so tvm-ffi cannot open it. Fix: move it"
    return None


def identity(path: Path) -> Identity:
    """Return the identity of the file that a path leads to now."""
    return _identity(path.stat())


def _identity(status: os.stat_result) -> Identity:
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
