# SPDX-License-Identifier: Apache-2.0
"""Random calls without a plan in reference mode against the definition, logit by logit."""

from __future__ import annotations

import os

import attention_naive
import pytest
import torch
from attention_calls import problem
from attention_cases import Space
from functional_calls import FUNCTIONS, call, draw, made

import precast

SPACE = Space(
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    head_dims=((64, 64), (80, 80)),
    most_kv=30,
    most_q=12,
    most_pairs=300,
    device="cpu",
)
CASES = 40
FIRST = int(os.environ.get("ATTENTION_SEED", "0"))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_random_calls(function):
    """A failure shows the seed in the case; ``draw(seed, SPACE, (function,))`` makes it again."""
    workspace = torch.full((1 << 20,), 0xA5, dtype=torch.uint8)
    problems = []
    for seed in range(FIRST, FIRST + CASES):
        drawn = draw(seed, SPACE, (function,))
        given = made(drawn, "cpu", workspace)
        with precast.reference_mode():
            out, lse = call(drawn, given)
        want = attention_naive.attention(given.case, given.batch)
        text = problem(given.case, (out, want[1] if lse is None else lse), want)
        if text:
            problems.append(f"{drawn}: {text}")
    assert problems == []
