# SPDX-License-Identifier: Apache-2.0
"""Names of places that mean the same to every compiler.

nvcc starts its parts through a shell. It puts paths in double quotes, in which the shell still runs
``$(...)`` and backquotes, and it splits lists at commas; file maps are split at ``=``. So compilers
never see another name than one of plain characters: a place with another one gets a symbolic link.
nvcc follows links to its source and gives the shell what it finds, so a source gets a file that
includes it.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from precast._jit.toolchain import Toolchain
from precast._plan.spec import ModuleSpec

_PLAIN = re.compile(r"[\w./+@~-]+")


def is_plain(text: str) -> bool:
    """Whether every compiler takes ``text`` as it is."""
    return _PLAIN.fullmatch(text) is not None


class PlainNames:
    """Links with plain names, for as long as a ``with`` block lasts; none where none is needed."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._links: dict[Path, Path] = {}
        #: The files that were made to include sources.
        self.wrappers: dict[Path, Path] = {}

    def __enter__(self) -> PlainNames:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def of(self, path: Path) -> Path:
        """``path`` itself, or a link that leads to it.

        Raises
        ------
        OSError
            If there is no folder with a plain name to make the link in.
        """
        if is_plain(str(path)):
            return path
        if path not in self._links:
            link = self._new()
            link.symlink_to(path.absolute())
            self._links[path] = link
        return self._links[path]

    def beside(self, path: Path) -> Path:
        """The same for a file that finds others by the folder it lies in."""
        return path if is_plain(str(path)) else self.of(path.parent) / path.name

    def source(self, path: Path) -> Path:
        """The same for a source of nvcc, which follows links to it."""
        if is_plain(str(path)) and is_plain(str(path.resolve())):
            return path
        if path not in self.wrappers:
            folder = self._new()
            folder.mkdir()
            wrapper = self.wrappers[path] = folder / path.name
            wrapper.write_text(f'#include "{self.beside(path.absolute())}"\n', encoding="utf-8")
        return self.wrappers[path]

    def _new(self) -> Path:
        self._folder = self._folder or _temporary_folder()
        return self._folder / str(len(self._links) + len(self.wrappers))

    def spec(self, spec: ModuleSpec) -> ModuleSpec:
        """The same module for commands; its fingerprint is that of the original."""
        named = dataclasses.replace(
            spec,
            root=self.of(spec.root),
            include_paths=tuple(map(self.of, spec.include_paths)),
        )
        sources = tuple(str(self._of_source(named, source)) for source in spec.sources)
        return dataclasses.replace(named, sources=sources)

    def _of_source(self, spec: ModuleSpec, source: str) -> Path:
        path = spec.source_path(source)
        return self.source(path) if path.suffix == ".cu" else self.beside(path)

    def toolchain(self, toolchain: Toolchain) -> Toolchain:
        """The same compilers and headers."""
        toolkit = toolchain.toolkit
        nvcc = toolkit.nvcc
        if not is_plain(str(nvcc)):  # It searches for its parts from ``bin/..`` on.
            nvcc = self.of(nvcc.parents[1]) / "bin" / nvcc.name
        return dataclasses.replace(
            toolchain,
            toolkit=dataclasses.replace(
                toolkit,
                nvcc=nvcc,
                include=self.of(toolkit.include),
                cudart=self.beside(toolkit.cudart),
                cccl=None if toolkit.cccl is None else self.of(toolkit.cccl),
            ),
            host_compiler=self.beside(toolchain.host_compiler),
            tvm_ffi_include=self.of(toolchain.tvm_ffi_include),
            tvm_ffi_library=self.beside(toolchain.tvm_ffi_library),
        )


def _temporary_folder() -> Path:
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if is_plain(place) and os.access(place, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix="precast-", dir=place))
    raise OSError(errno.EACCES, "no temporary folder with a plain name; set TMPDIR")
