# SPDX-License-Identifier: Apache-2.0
"""Attention kernels against the references: 5,000 random cases, fresh ones each time.

A failure shows its case, whose ``seed`` makes it again: ``draw(seed, Space())``.
``PRECAST_TEST_SEED`` sets the first. Cases are of the modules that are there: all of them where
they may be compiled.
"""

from __future__ import annotations

import functools
import itertools
import os

import pytest
import torch
from attention_calls import WORKSPACE_BYTES, call, expected, make, problem
from attention_cases import Case, Space, draw

from precast._base.dtypes import DTYPE_WORDS
from precast._runtime.loader import loader
from precast.errors import UnsupportedConfigError

SHARDS, CASES = 50, 100
FIRST = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(3), "little"))


@functools.cache
def _is_there(dtype: torch.dtype, kv_dtype: torch.dtype, head_dims: tuple[int, int]) -> bool:
    axes = {
        "dtype_q": DTYPE_WORDS[str(dtype)],
        "dtype_kv": DTYPE_WORDS[str(kv_dtype)],
        "head_dim_qk": head_dims[0],
        "head_dim_vo": head_dims[1],
    }
    major, minor = torch.cuda.get_device_capability()
    try:
        found = loader.resolve("attention", axes, f"{major}.{minor}")
    except UnsupportedConfigError:
        return False
    return found.path is not None or found.steps[-1].accepted


def served(case: Case) -> bool:
    return _is_there(case.dtype, case.kv_dtype, (case.head_dim_qk, case.head_dim_vo))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_cases(shard: int) -> None:
    first = (FIRST + shard) << 20
    print(f"PRECAST_TEST_SEED={FIRST}: seeds from {first} on")
    # Whatever a workspace holds at first.
    workspace = torch.full((WORKSPACE_BYTES,), 0xFF, dtype=torch.uint8, device="cuda")
    drawn = (draw(seed, Space()) for seed in range(first, first + 100 * CASES))
    problems = []
    count = 0
    for case in itertools.islice(filter(served, drawn), CASES):
        count += 1
        batch = make(case, "cuda")
        text = problem(case, call(case, batch, workspace), expected(case, batch))
        if text:
            problems.append(text)
    assert problems == []
    assert count == CASES, "few modules are there"
