# SPDX-License-Identifier: Apache-2.0
"""Attention kernels against the references: 5,000 random cases, fresh ones each time.

A failure shows its case, whose ``seed`` makes it again: ``draw(seed, Space())``.
``PRECAST_TEST_SEED`` sets the first.
"""

from __future__ import annotations

import os

import pytest
import torch
from attention_calls import WORKSPACE_BYTES, call, expected, make, problem
from attention_cases import Space, draw

SHARDS, CASES = 50, 100
FIRST = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(3), "little"))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_cases(shard: int) -> None:
    first = FIRST + shard * CASES
    print(f"PRECAST_TEST_SEED={FIRST}: seeds {first} to {first + CASES - 1}")
    # Whatever a workspace holds at first.
    workspace = torch.full((WORKSPACE_BYTES,), 0xFF, dtype=torch.uint8, device="cuda")
    problems = []
    for seed in range(first, first + CASES):
        case = draw(seed, Space())
        batch = make(case, "cuda")
        text = problem(case, call(case, batch, workspace), expected(case, batch))
        if text:
            problems.append(text)
    assert problems == []
