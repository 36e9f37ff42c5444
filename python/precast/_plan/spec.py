# SPDX-License-Identifier: Apache-2.0
"""``ModuleSpec``: everything that makes one module."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from precast._base.names import axis_word
from precast._plan.config import Arch, AxisValue
from precast._plan.includes import SourceFiles, include_closure
from precast._plan.places import CUTE_DSL_FOLDER

#: Compiles ``*.py`` sources; relative to the root of the project.
CUTE_DSL_COMPILER = f"{CUTE_DSL_FOLDER}/_compile.py"
#: What it includes in the code that it writes.
CUTE_DSL_HEADER = "csrc/core/cute_kernel.h"


@dataclass(frozen=True)
class ModuleSpec:
    """One module for one target and one CUDA major, whether it is built ahead of time or by JIT.

    Attributes
    ----------
    name : str
        The module's name, such as ``norm__dtype_bf16``; the target is not part of it.
    sources : tuple of str
        ``*.cu`` for nvcc, ``*.cc`` for the host compiler and ``*.py`` for the compiler of CuTe DSL;
        relative to ``root`` unless absolute.
    defines : tuple of str
        Macros of the ``*.cu`` files. The ``*.cc`` files get none, so that their objects can be
        shared by every module of an op.
    cute_dsl : str
        The version of the compiler of ``*.py`` files.
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
    cute_dsl: str
    defines: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    include_paths: tuple[Path, ...] = ()
    op: str = ""
    axes: Mapping[str, AxisValue] = field(default_factory=dict)
    is_aot: bool = False
    ffi_in_cuda: bool = False

    # -- identity ---------------------------------------------------------------------------------

    @property
    def is_of_user(self) -> bool:
        """Whether a user wrote it, so that its includes may take any form."""
        return self.ffi_in_cuda

    @property
    def is_cute_dsl(self) -> bool:
        """Whether it has kernels in CuTe DSL, so that the build needs the compiler of these."""
        return any(source.endswith(".py") for source in self.sources)

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
            "sources": [_portable(s, []) if s.startswith(os.sep) else s for s in self.sources],
            "defines": list(self.defines),
            "cuda_flags": list(self.cuda_flags),
            "host_flags": list(self.host_flags),
            "link_flags": list(self.link_flags),
            "exports": list(self.exports),
            "tvm_ffi": list(self.tvm_ffi_range),
            **({"cute_dsl": self.cute_dsl} if self.is_cute_dsl else {}),
        }

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the canonical spec and the contents of all that it is compiled from."""
        return self.fingerprint_of(self.contents())

    def files(self) -> list[Path]:
        """Every file that it is compiled from, those of its op."""
        return include_closure(self._first_files(), self.include_folders)

    def _first_files(self) -> list[Path]:
        compiler = (CUTE_DSL_COMPILER, CUTE_DSL_HEADER) if self.is_cute_dsl else ()
        return [
            *(self.source_path(s) for s in self.sources),
            *(self.root / file for file in (*compiler, self.version_script)),
        ]

    def contents(self, files: SourceFiles | None = None) -> str:
        """Name and sha256 of :meth:`files`, as JSON.

        ``files`` are of the same folders, for a caller that needs the contents of many ops.
        """
        files = SourceFiles(self.include_folders) if files is None else files
        bases = [os.path.realpath(folder) for folder in (self.root, *self.include_paths)]
        paths = files.closure(self._first_files())
        return _json(sorted((_portable(path, bases), files.sha256(path)) for path in paths))

    def fingerprint_of(self, contents: str) -> str:
        """:attr:`fingerprint`, for a caller that has read the op's files for another spec."""
        return hashlib.sha256(f"[{_json(self.canonical())},{contents}]".encode()).hexdigest()

    # -- flags ------------------------------------------------------------------------------------

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
        if source.endswith(".py"):
            axes = [f"--axis={axis}={axis_word(value)}" for axis, value in self.axes.items()]
            return [f"--arch={self.arch.sass}", f"--version={self.cute_dsl}", *axes]
        return list(self.host_flags)


def _json(value: object) -> str:
    """One text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _portable(path: str, bases: list[str]) -> str:
    """The path of a file below one of ``bases``, without what is this machine's."""
    for base in bases:
        folder = base.rstrip(os.sep) + os.sep
        if path.startswith(folder):
            return path[len(folder) :]
    return path.rpartition(os.sep)[2]
