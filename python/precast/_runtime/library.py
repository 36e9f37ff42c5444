# SPDX-License-Identifier: Apache-2.0
"""Open the library of a module through tvm-ffi, which is imported at the first one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast._base.errors import FFI_KINDS, LoadError
from precast._base.trust import was_exchanged
from precast._plan.installed import plan_document
from precast._runtime.cudart import open_cudart

if TYPE_CHECKING:
    import tvm_ffi


def load_library(path: Path, cuda_major: int) -> tvm_ffi.Module:
    """Open a module's library.

    libcudart is opened by its full path first, whether torch has loaded one already or not: a
    module names it, but does not say where it is.

    Raises
    ------
    LoadError
        If libcudart is missing or the library does not open; the message gives the linker's words.
        If the file was exchanged since its contents were checked.
    """
    row = plan_document()["cuda"][str(cuda_major)]
    open_cudart(row["cudart"], row["cudart_wheel"])
    ffi = _import_tvm_ffi()
    _refuse_another(path)  # Before the linker runs its constructors.
    try:
        module: tvm_ffi.Module = ffi.load_module(str(path))
    except Exception as error:
        raise LoadError(f"{path} was accepted but did not load: {error}") from error
    _refuse_another(path)
    return module


def _refuse_another(path: Path) -> None:
    if was_exchanged(path):
        raise LoadError(
            f"{path} was exchanged while it was loaded. Fix: end what installs or builds it, then "
            f"start again"
        )


def import_ffi() -> None:
    """Import tvm-ffi, and torch with it, which takes seconds.

    It comes before the contents of a library are checked, so that the file is opened right after.
    """
    _import_tvm_ffi()


@functools.cache
def _import_tvm_ffi() -> Any:
    import tvm_ffi

    for kind in FFI_KINDS:
        tvm_ffi.register_error(kind.__name__, kind)
    return tvm_ffi


def get_function(module: tvm_ffi.Module, export: str) -> Any:
    """An exported function; LoadError if the library lacks it."""
    try:
        return module.get_function(export)
    except Exception as error:
        raise LoadError(f"the library has no function {export!r}: {error}") from error
