# SPDX-License-Identifier: Apache-2.0
"""Random cases of attention in reference mode against its definition, logit by logit."""

from __future__ import annotations

import os

import attention_naive
import pytest
import torch
from attention_calls import call, expected, make, problem
from attention_cases import Space, draw

import precast

SPACE = Space(
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    head_dims=((64, 64), (80, 80)),
    most_kv=30,
    most_q=12,
    most_pairs=300,
    device="cpu",
)
SHARDS, CASES = 8, 25
FIRST = int(os.environ.get("ATTENTION_SEED", "0"))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_cases(shard):
    """A failure shows the seed in the case; ``draw(seed, SPACE)`` makes it again."""
    workspace = torch.empty(64, dtype=torch.uint8)
    problems = []
    for seed in range(FIRST + shard * CASES, FIRST + (shard + 1) * CASES):
        case = draw(seed, SPACE)
        batch = make(case, "cpu")
        with precast.reference_mode():
            got = call(case, batch, workspace)
        want = attention_naive.attention(case, batch)
        problems += [
            text
            for text in (problem(case, got, want), problem(case, expected(case, batch), want))
            if text
        ]
    assert problems == []
