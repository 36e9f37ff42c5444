# SPDX-License-Identifier: Apache-2.0
"""Test on the CPU how the GEMMs for every GPU choose and place their tiles.

``gemm_tiles.cpp`` calls the functions that launcher and kernel call.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from build_support import run
from host_programs import SANITIZED, compiled, with_change

SOURCE = Path(__file__).with_name("gemm_tiles.cpp")
HEADER = "precast/gemm/gemm_tiles.cuh"
PROBLEMS = 1000


def test_random_problems(tmp_path: Path) -> None:
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(2), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    run([compiled(tmp_path, SOURCE, *SANITIZED), PROBLEMS, seed])


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
    include = with_change(tmp_path, HEADER, *BROKEN[what])
    program = compiled(tmp_path, SOURCE, *SANITIZED, include=include)
    run([program, PROBLEMS, 5], fails=True)
