# SPDX-License-Identifier: Apache-2.0
"""How an all-reduce is cut, on the CPU: rows of every length, with and without clusters.

``allreduce_cut.cpp`` calls the functions that the launcher calls.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from build_support import ROOT, run

from precast._jit.toolchain import find_toolchain

SOURCE = Path(__file__).with_name("allreduce_cut.cpp")
HEADER = "precast/comm/allreduce_cut.cuh"


def compiled(folder: Path, *include: Path) -> Path:
    program = folder / "allreduce_cut"
    words = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    words += [f"-I{path}" for path in (*include, ROOT / "include")]
    words += ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
    run([find_toolchain().host_compiler, *words, "-o", program, SOURCE])
    return program


def test_every_row_fits(tmp_path: Path) -> None:
    assert run([compiled(tmp_path)]).strip() == "all cuts fit"


# Each change breaks the header at a point that one check of the program is for.
BROKEN = {
    "rows without clusters": ("most * (cut->cluster > 0", "kMaxRowThreads * (cut->cluster > 0"),
    "CTAs of half a GPU": ("(parts < 8 ? parts : 8)", "parts"),
    "rows of a round": ("(world - 1) * part_vecs + row_vecs", "(world - 1) * part_vecs"),
    "two ranks": ("if (world == 2) return true;", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_wrong_cut_is_found(what: str, tmp_path: Path) -> None:
    text = (ROOT / "include" / HEADER).read_text(encoding="utf-8")
    before, after = BROKEN[what]
    assert text.count(before) == 1
    header = tmp_path / HEADER
    header.parent.mkdir(parents=True)
    header.write_text(text.replace(before, after), encoding="utf-8")
    said = run([compiled(tmp_path, tmp_path)], fails=True)
    assert said.startswith("line "), said
