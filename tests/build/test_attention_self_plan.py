# SPDX-License-Identifier: Apache-2.0
"""Test on the CPU that the work which CTAs find without a plan is the work of a plan.

``attention_self_plan.cpp`` calls the same functions as the kernels, but for the sums of a warp.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from build_support import run, some
from test_attention_schedule import SANITIZED, broken, compiled

SOURCE = Path(__file__).with_name("attention_self_plan.cpp")
CASES = 3000


def test_random_batches(tmp_path: Path) -> None:
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    printed = run([compiled(tmp_path, *SANITIZED, source=SOURCE), CASES, seed])
    assert int(printed.partition(" split tiles are right")[0]) > 5 * CASES


# Each change breaks the header at a point that the program looks at.
BROKEN = {
    "the splits of a tile": ("start.boundary = boundary;", ""),
    "the end of a tile": ("boundary.n_block == n_blocks) {\n    ++start.tile;", "false) {"),
    "the head": (
        "int32_t head = static_cast<int32_t>(cost",
        "int32_t head = static_cast<int32_t>((cost + 1)",
    ),
    "the request": ("costs[middle]) <= cost", "costs[middle]) < cost"),
    "costs of 64 bits": ("int64_t(1) << 32", "int64_t(1) << 40"),
    "ragged queries": ("p.lengths.qo_indptr == nullptr && ", ""),
    "the rows of a tile": ("rows > 0 && rows <= p.shape.block_m", "rows > 0"),
    "the split workspace": (" && p.max_partials >= 2 * int64_t(p.shape.ctas)", ""),
}


@pytest.mark.parametrize("what", some(BROKEN))
def test_the_program_finds_what_is_broken(what: str, tmp_path: Path) -> None:
    include = broken(tmp_path, *BROKEN[what])
    program = compiled(tmp_path, "-w", include=include, source=SOURCE)
    assert "right" not in run(["timeout", "60", program, CASES, 1], fails=True)
