# SPDX-License-Identifier: Apache-2.0
"""Which plans allow tiles with the rows of two KV heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_support import F32, SIZES, TABLE, cache, decode, workspace

import precast
from precast._ops.attention import kernels

pytestmark = pytest.mark.usefixtures("reference_mode")


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, True),
        ({"logits_soft_cap": 0}, True),
        ({"window_left": 3, "sm_scale": -0.5}, True),
        ({"logits_soft_cap": 30.0}, False),
        ({"pos_encoding_mode": "ALIBI"}, False),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, False),
    ],
    ids=str,
)
def test_a_decode_allows_them_if_its_scores_are_plain(
    options: dict[str, Any], allowed: bool
) -> None:
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, **F32, **options)
    assert wrapper._plan.shape.may_pair_heads is allowed


def test_caches_with_scales_of_blocks_and_prefills_do_not() -> None:
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, q_data_type=torch.float16, kv_data_type=torch.uint8)
    assert not wrapper._plan.shape.may_pair_heads
    prefill = precast.BatchPrefillWithPagedKVCacheWrapper(workspace())
    starts = torch.arange(len(TABLE[0]), dtype=torch.int32)
    prefill.plan(starts, *TABLE, *SIZES, **F32)
    assert not prefill._plan.shape.may_pair_heads


@pytest.mark.parametrize("through", ["run", "forward"])
def test_a_soft_cap_behind_the_plan_divides_the_work_again(
    through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, **F32)
    q, kv = torch.randn(2, 4, 64), cache()
    launched = []
    real = kernels.launch
    monkeypatch.setattr(
        kernels, "launch", lambda plan, sources: (launched.append(plan), real(plan, sources))
    )
    if through == "run":
        wrapper._logits_soft_cap = 5.0  # as engines set it
        out = wrapper.run(q, kv)
    else:
        out = wrapper.forward(q, kv, logits_soft_cap=5.0)
    assert [plan.shape.may_pair_heads for plan in launched] == [False]
    other = decode()
    other.plan(*TABLE, *SIZES, logits_soft_cap=5.0, **F32)
    assert torch.equal(out, other.run(q, kv))


@pytest.mark.parametrize("options", [{"fixed_split_size": 4}, {"disable_split_kv": True}], ids=str)
def test_plans_that_never_pair_are_not_divided_again(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    wrapper.plan(*TABLE, *SIZES, **F32, **options)
    assert not wrapper._plan.shape.may_pair_heads
    monkeypatch.setattr(kernels, "launch", lambda *given: pytest.fail("divided again"))
    wrapper.forward(torch.randn(2, 4, 64), cache(), logits_soft_cap=5.0)


def test_a_plan_of_an_engine_keeps_what_the_plan_before_allowed() -> None:
    wrapper = decode()
    for options, allowed in (({}, True), ({"logits_soft_cap": 2.0}, False)):
        wrapper.plan(*TABLE, *SIZES, **F32, **options)
        precast.fast_decode_plan(wrapper, *TABLE, *SIZES, **F32, **options)
        assert wrapper._plan.shape.may_pair_heads is allowed
