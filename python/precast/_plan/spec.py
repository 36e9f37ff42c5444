# SPDX-License-Identifier: Apache-2.0
"""``JitSpec``: everything that makes one module, and the commands that build it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from precast._plan.config import Arch, AxisValue
from precast._plan.includes import include_closure

if TYPE_CHECKING:
    import tvm_ffi

    from precast._jit.toolchain import Toolchain


class Command(NamedTuple):
    """One compiler or linker call."""

    kind: str  # "cuda", "host" or "link"
    argv: list[str]
    output: Path


@dataclass(frozen=True)
class JitSpec:
    """One module for one target and one CUDA major, built ahead of time or on the spot.

    Attributes
    ----------
    name : str
        The module's name, such as ``norm__dtype_bf16``; the target is not part of it.
    sources : tuple of str
        ``*.cu`` for nvcc and ``*.cc`` for the host compiler; relative to ``root`` unless absolute.
    defines : tuple of str
        Macros of the ``*.cu`` files. The ``*.cc`` files get none, so that their objects can be
        shared by every module of an op.
    exports : tuple of str
        Functions that the module must export; empty for "at least one" (kernels of a user).
    is_aot : bool
        Whether some profile prebuilds it.
    ffi_in_cuda : bool
        Whether ``*.cu`` files may include tvm-ffi. A user's may; those of the plan never do.
    """

    name: str
    arch: Arch
    cuda_major: int
    root: Path
    sources: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    host_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    version_script: str
    tvm_ffi_range: tuple[str, str]
    cudart: str
    defines: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    include_paths: tuple[Path, ...] = ()
    op: str = ""
    axes: Mapping[str, AxisValue] = field(default_factory=dict)
    is_aot: bool = False
    ffi_in_cuda: bool = False

    # -- identity ---------------------------------------------------------------------------------

    @property
    def file_name(self) -> str:
        """Where the library lies inside a provider: ``sm90a/norm__dtype_bf16.so``."""
        return f"{self.arch.name}/{self.name}.so"

    def source_path(self, source: str) -> Path:
        return self.root / source

    @property
    def include_folders(self) -> list[Path]:
        return [*self.include_paths, self.root / "include", self.root / "csrc"]

    def canonical(self) -> dict[str, Any]:
        """What the fingerprint covers besides file contents; holds no path of this machine."""
        return {
            "name": self.name,
            "target": self.arch.target,
            "cuda_major": self.cuda_major,
            "sources": [Path(s).name if Path(s).is_absolute() else s for s in self.sources],
            "defines": list(self.defines),
            "cuda_flags": list(self.cuda_flags),
            "host_flags": list(self.host_flags),
            "link_flags": list(self.link_flags),
            "exports": list(self.exports),
            "tvm_ffi": list(self.tvm_ffi_range),
        }

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the canonical spec and the contents of all that it is compiled from."""
        return self.fingerprint_of(self.contents())

    def contents(self) -> str:
        """Name and sha256 of every file that it is compiled from, those of its op, as JSON."""
        files = include_closure(
            [*(self.source_path(s) for s in self.sources), self.root / self.version_script],
            self.include_folders,
        )
        bases = [folder.resolve() for folder in (self.root, *self.include_paths)]
        return _json(sorted((_portable(path, bases), _sha256(path)) for path in files))

    def fingerprint_of(self, contents: str) -> str:
        """:attr:`fingerprint`, for a caller that has read the op's files for another spec."""
        return hashlib.sha256(f"[{_json(self.canonical())},{contents}]".encode()).hexdigest()

    # -- commands ---------------------------------------------------------------------------------

    def compile_flags(self, source: str) -> list[str]:
        """The flags of one source that hold no path of this machine."""
        if source.endswith(".cu"):
            return [
                *self.cuda_flags,
                f"-gencode={self.arch.gencode}",
                *(f"-D{define}" for define in self.defines),
                # Names of internal linkage get a hash of this, by default of the source's own path.
                f"-Xcudafe=--orig_src_path_name={self.name}",
            ]
        return list(self.host_flags)

    def location_flags(self, source: str) -> list[str]:
        """Where our headers are; ``__FILE__`` then names files without this machine's paths."""
        from precast._jit.toolchain import for_host_compiler

        names = f"-ffile-prefix-map={self.root}/="
        return [
            *(f"-I{path}" for path in self.include_folders),
            for_host_compiler(names) if source.endswith(".cu") else names,
        ]

    def commands(self, toolchain: Toolchain, folder: Path) -> list[Command]:
        """Compile commands, independent of one another, then the link command."""
        commands = []
        for source in self.sources:
            output = folder / (Path(source).name + ".o")
            cuda = source.endswith(".cu")
            compiler = toolchain.nvcc_command() if cuda else [str(toolchain.host_compiler)]
            argv = [
                *compiler,
                *self.compile_flags(source),
                *self.location_flags(source),
                *toolchain.include_flags(cuda, self.ffi_in_cuda),
                "-c",
                str(self.source_path(source)),
                "-o",
                str(output),
            ]
            commands.append(Command("cuda" if cuda else "host", argv, output))
        library = folder / f"{self.name}.so"
        argv = [
            str(toolchain.host_compiler),
            *self.link_flags,
            f"-Wl,--version-script={self.root / self.version_script}",
            *(str(command.output) for command in sorted(commands, key=lambda c: c.kind == "cuda")),
            *toolchain.libraries,
            "-o",
            str(library),
        ]
        return [*commands, Command("link", argv, library)]

    # -- build and load ---------------------------------------------------------------------------

    @property
    def is_compiled(self) -> bool:
        """Whether the JIT cache of this user holds a build that fits."""
        return self.get_library_path() is not None

    def get_library_path(self) -> Path | None:
        """The library in the JIT cache, or None if it must be compiled first."""
        from precast._jit import cache

        return cache.find(self).path

    def build(self, reason: str = "build() was called") -> Path:
        """Compile into the JIT cache unless it is there; return the library's path.

        Raises
        ------
        MissingJITCacheError
            If ``PRECAST_JIT=error`` is set or ``precast.freeze()`` was called.
        ToolchainError, CompileError, CacheDirectoryError
            If it cannot be compiled or stored.
        """
        from precast._jit import compiler

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
        from precast._base.errors import MissingJITCacheError

        path = self.get_library_path()
        if path is None:
            raise MissingJITCacheError(
                f"{self.name} for {self.arch.name} is not compiled. Fix: call build() first", self
            )
        return self._open(path)

    def build_and_load(self) -> tvm_ffi.Module:
        """:meth:`build`, then :meth:`load`."""
        return self._open(self.build("build_and_load() was called"))

    def _open(self, path: Path) -> tvm_ffi.Module:
        from precast._runtime.loader import get_function, load_library

        module = load_library(path, self.cuda_major)
        for export in self.exports:
            get_function(module, export)
        return module


def _json(value: object) -> str:
    """One text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _portable(path: Path, bases: list[Path]) -> str:
    """The path of a file below one of ``bases``, without what is this machine's."""
    for base in bases:
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return path.name


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
