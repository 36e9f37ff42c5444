# SPDX-License-Identifier: Apache-2.0
"""Open the CUDA runtime that modules link with."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

from precast._base.errors import LoadError


@functools.cache
def open_cudart(soname: str, wheel: str) -> ctypes.CDLL:
    """Load ``libcudart.so.<major>`` into the process, once.

    Parameters
    ----------
    soname : str
        ``libcudart.so.13``.
    wheel : str
        The distribution with this library, on which every provider depends.

    Raises
    ------
    LoadError
        If it is not loaded, not in the Python environment and not on this machine.
    """
    try:
        return ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        pass
    tried = []
    for path in (*_in_wheel(wheel, soname), Path("/usr/local/cuda/lib64") / soname):
        tried.append(str(path))
        if path.is_file():
            return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL(soname)
    except OSError:
        raise LoadError(
            f"{soname} was not found in {', '.join(tried)} or on the linker's path. Fix: pip "
            f'install "{wheel}=={soname.rpartition(".")[2]}.*"'
        ) from None


def _in_wheel(wheel: str, soname: str) -> Iterator[Path]:
    try:
        files = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == soname:
            yield Path(str(file.locate()))
