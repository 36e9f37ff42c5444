# SPDX-License-Identifier: Apache-2.0
"""Find all files that a source includes, without a compiler.

The scan follows every ``#include`` that it can resolve inside the given folders, also those behind
an ``#if``, so it finds at least what the compiler would read. For headers that lie elsewhere (CUDA,
tvm-ffi, the C++ library) the fingerprint holds versions instead.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"\n]+)[>\"]", re.MULTILINE)


def include_closure(sources: Iterable[Path], folders: Sequence[Path]) -> list[Path]:
    """All files that ``sources`` include from ``folders``, the sources first."""

    @functools.cache
    def locate(name: bytes, *beside: Path) -> Path | None:
        for folder in (*beside, *folders):
            candidate = folder / os.fsdecode(name)
            if candidate.is_file():
                return candidate.resolve()
        return None

    found: dict[Path, None] = {}
    todo = [source.resolve() for source in sources]
    while todo:
        path = todo.pop(0)
        if path in found:
            continue
        found[path] = None
        for quote, name in _INCLUDE.findall(path.read_bytes()):
            included = locate(name, path.parent) if quote == b'"' else locate(name)
            if included is not None:
                todo.append(included)
    return list(found)
