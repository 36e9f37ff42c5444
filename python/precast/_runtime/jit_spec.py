# SPDX-License-Identifier: Apache-2.0
"""``JitSpec``: a module that can be compiled into the cache of this user, and loaded from there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from precast._base.errors import LoadError, MissingJITCacheError
from precast._base.shared_object import EXPORT_PREFIX
from precast._jit import cache, compiler
from precast._plan.spec import ModuleSpec
from precast._runtime.library import get_function, import_ffi, load_library

if TYPE_CHECKING:
    import tvm_ffi


class JitSpec(ModuleSpec):
    """A :class:`ModuleSpec` with the means to compile and load it."""

    @classmethod
    def of(cls, spec: ModuleSpec) -> JitSpec:
        """The same module: ``JitSpec.of(plan().spec("norm", {"dtype": "bf16"}, "9.0"))``."""
        return cls(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)})

    @property
    def is_compiled(self) -> bool:
        """Whether the JIT cache of this user holds a build that fits."""
        return self.get_library_path() is not None

    def get_library_path(self) -> Path | None:
        """The library in the JIT cache, or None if it must be compiled first."""
        return cache.find(self).path

    def build(self, reason: str = "build() was called") -> Path:
        """Compile into the JIT cache unless it is there; return the library's path.

        Parameters
        ----------
        reason : str
            Why it is compiled; goes to the log.

        Raises
        ------
        MissingJITCacheError
            If ``PRECAST_JIT=error`` is set or ``precast.freeze()`` was called.
        ToolchainError, CompileError, CacheDirectoryError
            If it cannot be compiled or stored.
        """
        return compiler.build(self, reason)

    def load(self) -> tvm_ffi.Module:
        """Load the compiled library.

        Raises
        ------
        MissingJITCacheError
            If it is not compiled.
        LoadError
            If it does not open, or lacks one of ``exports``.
        """
        import_ffi()
        path = self.get_library_path()
        if path is None:
            raise MissingJITCacheError(
                f"{self.name} for {self.arch.name} is not compiled. Fix: call build() first", self
            )
        return self._open(path)

    def build_and_load(self) -> tvm_ffi.Module:
        """:meth:`build`, then :meth:`load`."""
        import_ffi()
        return self._open(self.build("build_and_load() was called"))

    def _open(self, path: Path) -> tvm_ffi.Module:
        module = load_library(path, self.cuda_major)
        for export in self.exports:
            get_function(module, export)
        if not self.exports and f"\0{EXPORT_PREFIX}".encode() not in path.read_bytes():
            raise LoadError(
                f"{path} exports no function. Fix: TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, function)"
            )
        return module
