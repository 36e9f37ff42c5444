# SPDX-License-Identifier: Apache-2.0
"""How an all-reduce is cut, on the CPU: rows of every length, with and without clusters.

``allreduce_cut.cpp`` calls the functions that the launcher calls.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from build_support import run
from host_programs import SANITIZED, compiled, with_change

SOURCE = Path(__file__).with_name("allreduce_cut.cpp")
HEADER = "precast/comm/allreduce_cut.cuh"


def test_every_row_fits(tmp_path: Path) -> None:
    assert run([compiled(tmp_path, SOURCE, *SANITIZED)]).strip() == "all cuts fit"


# Each change breaks the header at a point that one check of the program is for.
BROKEN = {
    "rows without clusters": ("most * (cut->cluster > 0", "kMaxRowThreads * (cut->cluster > 0"),
    "CTAs of half a GPU": ("(parts < 8 ? parts : 8)", "parts"),
    "rows of a round": ("(world - 1) * part_vecs + row_vecs", "(world - 1) * part_vecs"),
    "two ranks": ("if (world == 2) return true;", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_wrong_cut_is_found(what: str, tmp_path: Path) -> None:
    include = with_change(tmp_path, HEADER, *BROKEN[what])
    program = compiled(tmp_path, SOURCE, *SANITIZED, include=include)
    said = run([program], fails=True)
    assert said.startswith("line "), said
