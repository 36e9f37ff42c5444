# SPDX-License-Identifier: Apache-2.0
"""Test on the CPU how the GEMMs for every GPU choose and place their tiles.

``gemm_tiles.cpp`` calls the functions that launcher and kernel call.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from build_support import ROOT, run

from precast._jit.toolchain import find_toolchain

SOURCE = Path(__file__).with_name("gemm_tiles.cpp")
HEADER = Path("precast/gemm/gemm_tiles.cuh")
SANITIZED = "-fsanitize=undefined", "-fno-sanitize-recover=all"
PROBLEMS = 1000


def compiled(folder: Path, *include: Path) -> Path:
    program = folder / SOURCE.stem
    words = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *SANITIZED]
    folders = [f"-I{path}" for path in (*include, ROOT / "include", SOURCE.parent)]
    run([find_toolchain().host_compiler, *words, *folders, "-o", program, SOURCE])
    return program


def test_random_problems(tmp_path: Path) -> None:
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(2), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    run([compiled(tmp_path), PROBLEMS, seed])


# Each change breaks the header at a point that one check of the program is for.
BROKEN = {
    "the start of a band": ("band * height + in_band", "band + in_band"),
    "ranges end tiles": (
        "(kind == TokenGroups::ranges ? groups : 0)",
        "(kind == TokenGroups::blocks ? groups : 0)",
    ),
    "batches": (
        "return kind == TokenGroups::equal || kind",
        "return kind == TokenGroups::ranges || kind",
    ),
    "few tokens": ("if (tokens <= kGemmTiles[tile].tokens) return tile;", "return tile;"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_program_notices(what: str, tmp_path: Path) -> None:
    before, after = BROKEN[what]
    text = (ROOT / "include" / HEADER).read_text()
    assert text.count(before) == 1, before
    header = tmp_path / HEADER
    header.parent.mkdir(parents=True)
    header.write_text(text.replace(before, after))
    run([compiled(tmp_path, tmp_path), PROBLEMS, 5], fails=True)
