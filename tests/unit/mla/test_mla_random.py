# SPDX-License-Identifier: Apache-2.0
"""The wrapper of MLA in reference mode against float64: random cases, the same each time."""

from __future__ import annotations

import pytest
import torch
from mla_cases import Space, draw, expected, make, problem, run, wrapper_of

import precast

SPACE = Space(
    most_batch=4, most_kv=140, most_q=9, most_tokens=300, most_pairs=1 << 15, device="cpu"
)
CASES = 12


@pytest.mark.parametrize("shard", range(4))
def test_random_cases(shard: int) -> None:
    problems = []
    for seed in range(shard * CASES, (shard + 1) * CASES):
        case = draw(seed, SPACE)
        batch = make(case, "cpu")
        with precast.reference_mode():
            wrapper = wrapper_of(case, batch, torch.empty(64, dtype=torch.uint8))
            got = run(case, batch, wrapper)
        problems.append(problem(case, got, expected(case, batch)))
    assert [text for text in problems if text] == []


def test_cases_have_everything() -> None:
    """No option is left out by the way in which cases are drawn."""
    cases = [draw(seed, Space()) for seed in range(2000)]
    for name, values in {
        "form": {"csr", "dense", "metadata"},
        "layout": {"apart", "joined", "pages"},
        "query_form": {"split", "pair", "packed"},
        "lse": {"none", "base2", "basee"},
        "scale_arr": {True, False},
        "scales_on_device": {True, False},
        "sinks": {True, False},
        "head_dim_kpe": {0, 64},
        "head_dim_ckv": {256, 512},
    }.items():
        assert {getattr(case, name) for case in cases} == values
    assert max(max(case.kv_lens) for case in cases) > 90_000
    assert max(len(case.kv_lens) for case in cases) > 280
    assert any(0 in case.kv_lens for case in cases)
    assert any(case.q_lens and max(case.q_lens) > 100 for case in cases)
    assert any(case.causal and max(case.q_lens) > max(case.kv_lens) > 0 for case in cases)
