# SPDX-License-Identifier: Apache-2.0
"""Find all files that a source includes, without a compiler.

The scan follows every ``#include`` that it can resolve inside the given folders, also those behind
an ``#if``, so it finds at least what the compiler would read. For headers that lie elsewhere (CUDA,
tvm-ffi, the C++ library) the fingerprint holds versions instead. A source in Python imports files
beside it by ``from precast.cute_dsl.<name> import ...``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"\n]+)[>\"]", re.MULTILINE)
_IMPORT = re.compile(rb"^[ \t]*from precast\.cute_dsl\.(\w+) import", re.MULTILINE)


class _File(NamedTuple):
    sha256: str
    includes: list[tuple[bool, str]]  # whether it is in quotes, and the name


class SourceFiles:
    """Sources and what they include from ``folders``; each file is read once.

    Why not paths of pathlib: a checkout reads all files of all ops when it is imported.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(f"{folder}{os.sep}" for folder in folders)
        self._files: dict[str, _File] = {}
        self._places: dict[tuple[str, str], str | None] = {}

    def closure(self, sources: Iterable[Path]) -> list[str]:
        """Real paths of all files that ``sources`` include, the sources first."""
        found: dict[str, None] = {}
        todo = [os.path.realpath(source) for source in sources]
        for path in todo:  # which grows
            if path in found:
                continue
            found[path] = None
            beside = path[: path.rindex(os.sep) + 1]
            for in_quotes, name in self._file(path).includes:
                included = self._locate(name, beside if in_quotes else "")
                if included is not None:
                    todo.append(included)
        return list(found)

    def sha256(self, path: str) -> str:
        """The digest of a file of :meth:`closure`."""
        return self._file(path).sha256

    def _file(self, path: str) -> _File:
        if path not in self._files:
            data = Path(path).read_bytes()
            if path.endswith(".py"):
                includes = [(True, f"{os.fsdecode(name)}.py") for name in _IMPORT.findall(data)]
            else:
                found = _INCLUDE.findall(data)
                includes = [(mark == b'"', os.fsdecode(name)) for mark, name in found]
            self._files[path] = _File(hashlib.sha256(data).hexdigest(), includes)
        return self._files[path]

    def _locate(self, name: str, beside: str) -> str | None:
        if (name, beside) not in self._places:
            folders = (*((beside,) if beside else ()), *self._folders)
            places = (Path(f"{folder}{name}") for folder in folders)
            place = next((place for place in places if place.is_file()), None)
            self._places[name, beside] = None if place is None else os.path.realpath(place)
        return self._places[name, beside]


def include_closure(sources: Iterable[Path], folders: Sequence[Path]) -> list[Path]:
    """All files that ``sources`` include from ``folders``, the sources first."""
    return [Path(path) for path in SourceFiles(folders).closure(sources)]
