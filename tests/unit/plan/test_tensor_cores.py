# SPDX-License-Identifier: Apache-2.0
"""The ops that use the tensor cores of sm_90a, and the table of their instructions."""

from __future__ import annotations

from pathlib import Path

import pytest

from precast._jit.ptxas_gate import OPTION
from precast._plan.includes import include_closure
from precast._plan.places import source_root
from precast._plan.planner import Plan

ROOT = source_root()
PLAN = Plan.load(ROOT)
HEADER = ROOT / "include/precast/core/sm90/wgmma.cuh"


def files(op: str) -> list[Path]:
    """What the kernels of an op are compiled from."""
    sources = [ROOT / source for source in PLAN.config.op(op).sources]
    return include_closure(sources, [ROOT / "include", ROOT / "csrc"])


OPS = [op for op in PLAN.config.ops if HEADER in files(op)]


@pytest.mark.parametrize("op", OPS)
def test_what_ptxas_makes_slow_does_not_build(op):
    config = PLAN.config.op(op)
    (flag,) = [flag for flag in config.cuda_flags if flag.startswith("-Xptxas=")]
    wanted = {"--warn-on-spills", "--warn-on-local-memory-usage", OPTION}
    assert wanted <= set(flag.removeprefix("-Xptxas=").split(","))
    # Alone, but where the same sources hold kernels of other GPUs, which keep the rule, too.
    assert config.archs == ("sm90a",) or op == "moe_few_tokens"


def test_the_ops_are_found():
    assert {"attention_sm90", "attention_sm90_fp8", "mla_sm90"} <= {*OPS}
