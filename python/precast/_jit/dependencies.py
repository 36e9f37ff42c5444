# SPDX-License-Identifier: Apache-2.0
"""The files that a compiler has read for a user's kernel.

The fingerprint covers what a scan of the ``#include`` lines finds. It misses a name that a macro
makes, ``#include_next``, ``#import`` and other forms, so the compiler is asked, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from precast._base.files import read_regular

if TYPE_CHECKING:
    from precast._jit.toolchain import Toolchain
    from precast._plan.spec import ModuleSpec


def dependencies(
    spec: ModuleSpec, toolchain: Toolchain, work: Path, made: Collection[Path] = ()
) -> dict[str, str]:
    """sha256 by path of all files that only the compiler found.

    Those of toolchains are left out, and those that were ``made`` for the compile alone.
    """
    if not spec.is_of_user:
        return {}
    toolkit = toolchain.toolkit
    places = [toolkit.include, toolkit.cccl, toolkit.nvcc.parents[1], toolchain.tvm_ffi_include]
    versioned = [place.resolve() for place in places if place is not None]
    known = {*spec.files(), *(path.resolve() for path in made)}
    found: dict[str, str] = {}
    for rule in sorted(work.glob("*.d")):
        for name in _names(rule.read_text(encoding="utf-8", errors="surrogateescape")):
            path = (work / name).resolve()
            if path not in known and not any(path.is_relative_to(p) for p in versioned):
                found[str(path)] = sha256_of(path) or ""
    return found


def sha256_of(path: Path) -> str | None:
    """The digest of a file, or None if it cannot be read."""
    try:
        return hashlib.sha256(read_regular(path)[0]).hexdigest()
    except (OSError, ValueError):
        return None


def _names(rule: str) -> list[str]:
    """The prerequisites of a rule of make."""
    _, _, text = rule.replace("\\\n", " ").partition(": ")
    names = re.findall(r"(?:\\.|[^\s\\])+", text)
    return [re.sub(r"\\(.)", r"\1", name).replace("$$", "$") for name in names]
