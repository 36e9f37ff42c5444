# SPDX-License-Identifier: Apache-2.0
"""Programs that call host functions of the headers on the CPU, also of headers with one change."""

from __future__ import annotations

from pathlib import Path

from build_support import ROOT, run

from precast._jit.toolchain import find_toolchain

HEADERS = ROOT / "include"
SANITIZED = "-fsanitize=undefined", "-fno-sanitize-recover=all"


def compiled(folder: Path, source: Path, *flags: str, include: Path = HEADERS) -> Path:
    """Compile a program; what ``include`` does not have is taken from the checkout."""
    program = folder / source.stem
    words = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    folders = [f"-I{path}" for path in dict.fromkeys((include, HEADERS, source.parent))]
    run([find_toolchain().host_compiler, *words, *folders, *flags, "-o", program, source])
    return program


def with_change(folder: Path, header: str, before: str, after: str) -> Path:
    """A folder of headers that has one header, with one place of it changed."""
    text = (HEADERS / header).read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{before!r} is not in {header} once"
    copy = folder / header
    copy.parent.mkdir(parents=True)
    copy.write_text(text.replace(before, after), encoding="utf-8")
    return folder
