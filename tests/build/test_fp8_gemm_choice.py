# SPDX-License-Identifier: Apache-2.0
"""Test on the CPU how the GEMMs for Hopper choose and place their tiles.

``fp8_gemm_choice.cpp`` calls the functions that launcher and kernel call.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from build_support import run, some
from host_programs import SANITIZED, compiled, with_change

from precast._ops.gemm import _fp8, _plain
from precast._plan import gemm_model

SOURCE = Path(__file__).with_name("fp8_gemm_choice.cpp")
HEADER = "precast/gemm/sm90/choose.cuh"
PROBLEMS = 2000


def test_random_problems(tmp_path: Path) -> None:
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(2), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    assert run([compiled(tmp_path, SOURCE, *SANITIZED), PROBLEMS, seed]).startswith(
        f"{_fp8.CHOICES} and {_plain.CHOICES} choices"
    )
    numbers = {operands: len(gemm_model.choices(operands)) for operands in gemm_model.FAMILIES}
    assert numbers == {
        "fp8_block": _fp8.CHOICES,
        "fp8_row": _plain.CHOICES,
        "bf16": _plain.CHOICES,
    }
    assert len(gemm_model.CLUSTERS) == _fp8.CLUSTERS == _plain.CLUSTERS


@pytest.mark.parametrize("operands", gemm_model.FAMILIES)
def test_python_expects_the_same(operands: str, tmp_path: Path) -> None:
    """Of all choices the same clocks, and so the same one first."""
    program = compiled(tmp_path, SOURCE)
    kinds = ["plain", "masked", "ranges", "contiguous"]  # In the order of TokenGroups.
    lines = run([program, 300, 11, operands]).splitlines()
    for line in lines:
        shape, _, rest = line.partition(":")
        kind, *sizes = map(int, shape.split())
        chosen, *clocks = rest.split()
        problem = gemm_model.Problem(kinds[kind], *sizes)
        got = {str(c.number): e.clocks for c, e in gemm_model.ranking(problem, operands)}
        want = {number: float(x) for number, _, x in (word.partition("=") for word in clocks)}
        assert got == pytest.approx(want, rel=1e-12, abs=0)
        assert next(iter(got)) == chosen
    assert len(lines) == 300


# Each change breaks the header at a point that one check of the program is for.
BROKEN = {
    "the last band": ("left < band ? left : band", "left < 0 ? left : band"),
    "a tile that begins anywhere": ("{128, 192, false}", "{128, 208, false}"),
    "pairs of tiles": ("ClusterUse::shares_b ? 2 : 1)))", "ClusterUse::shares_b ? 1 : 1)))"),
    "tiles of neighbours": (
        "if (use == ClusterUse::shares_b) return kind != TokenGroups::blocks;",
        "if (use == ClusterUse::shares_b) return kind == TokenGroups::blocks;",
    ),
    "tiles of two blocks": ("choice.shape().tokens() > kFp8Block", "choice.shape().tokens() > 512"),
    "a tile without a kernel": (" || !Choice::Family::has_kernel(choice.tile)", ""),
    "the best": ("choice.clocks < best.clocks", "choice.clocks > best.clocks"),
}


@pytest.mark.parametrize("what", some(BROKEN))
def test_the_program_notices(what: str, tmp_path: Path) -> None:
    include = with_change(tmp_path, HEADER, *BROKEN[what])
    program = compiled(tmp_path, SOURCE, *SANITIZED, include=include)
    run([program, PROBLEMS, 5], fails=True)
