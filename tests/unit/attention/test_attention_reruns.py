# SPDX-License-Identifier: Apache-2.0
"""Runs that are not what was planned, shared memory, options of one request: all are rejected."""

from __future__ import annotations

import functools

import pytest
import torch
from attention_support import (
    F32,
    ROWS,
    SIZES,
    TABLE,
    TOKENS,
    attributes,
    cache,
    decode,
    paged,
    ragged,
    record_launches,
    workspace,
)

import precast
from precast._ops.attention import buffers, kernels, validation
from precast.errors import CacheLayoutError, PlanMismatchError

pytestmark = pytest.mark.usefixtures("reference_mode")


# -- runs of another shape ------------------------------------------------------------------------


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("packed", [False, True])
def test_heads_and_pages_are_those_of_the_plan(kv_layout, packed):
    decoding = precast.BatchDecodeWithPagedKVCacheWrapper(workspace(), kv_layout)
    decoding.plan(*TABLE, *SIZES, **F32)
    prefill = precast.BatchPrefillWithPagedKVCacheWrapper(workspace(), kv_layout)
    prefill.plan(torch.arange(3).int(), *TABLE, *SIZES, **F32)
    of_cache = r"must have 2 heads and pages of 8 tokens as in plan\(\), in layout " + kv_layout
    for heads, kv_heads, page_size, message in (
        (8, 2, 8, r"q must have 4 heads as in plan\(\)"),
        (2, 2, 8, r"q must have 4 heads as in plan\(\)"),
        (4, 4, 8, of_cache),
        (4, 1, 8, of_cache),
        (4, 2, 4, of_cache),
        (4, 2, 16, of_cache),
        (4, 8, 2, of_cache),
    ):
        q, kv = torch.randn(2, heads, 64), cache(kv_heads, page_size)
        if kv_layout == "HND":
            kv = kv.transpose(2, 3)
        given = kv if packed else (kv[:, 0], kv[:, 1])
        for wrapper in (decoding, prefill):
            with pytest.raises(ValueError, match=message):
                wrapper.run(q, given)


def test_a_page_size_of_1_is_one_of_the_plan():
    table = torch.tensor([0, 3, 4]), torch.tensor([2, 0, 5, 1]), torch.tensor([1, 1])
    wrapper = decode()
    wrapper.plan(*table, 4, 2, 64, 1, **F32)
    wrapper.run(torch.randn(2, 4, 64), torch.randn(6, 2, 2, 64))
    with pytest.raises(ValueError, match="pages of 1 tokens as in plan"):
        wrapper.run(torch.randn(2, 4, 64), cache())


@pytest.mark.parametrize("wrong", [None, 3])
def test_keys_are_tensors(wrong):
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, **F32)
    with pytest.raises(CacheLayoutError, match="paged_kv_cache must be a torch"):
        wrapper.run(torch.randn(2, 4, 64), wrong)
    of_tokens = ragged()
    of_tokens.plan(ROWS, TOKENS, 4, 2, 64, **F32)
    with pytest.raises(TypeError, match=r"run: k must be a torch.Tensor, got"):
        of_tokens.run(torch.randn(4, 4, 64), wrong, torch.randn(9, 2, 64))


def test_too_few_dimensions():
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, **F32)
    with pytest.raises(ValueError, match=r"q must have at least 3 dimensions, got shape \[2\]"):
        wrapper.run(torch.randn(2), cache())
    with pytest.raises(ValueError, match="paged_kv_cache must have at least 3 dimensions"):
        wrapper.run(torch.randn(2, 4, 64), torch.randn(2, 64))
    q, k = torch.randn(3, 4, 64), torch.randn(5, 2, 64)
    for call in (
        lambda: precast.single_prefill_with_kv_cache(q[0], k, k),
        lambda: precast.single_prefill_with_kv_cache(q, k[0], k, kv_layout="HND"),
        lambda: precast.single_decode_with_kv_cache(q[0], k, k[0]),
        lambda: precast.single_decode_with_kv_cache(q, k, k),
    ):
        with pytest.raises(ValueError, match=r"must have [23] dimensions, got shape"):
            call()


@pytest.mark.parametrize("make", [decode, paged])
def test_a_window_before_any_plan(make):
    with pytest.raises(PlanMismatchError, match="there is no plan"):
        make().run(torch.randn(2, 4, 64), cache(), window_left=3)


def test_options_of_forward_that_are_rejected_leave_the_plan():
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, **F32)
    q, kv = torch.randn(2, 4, 64), cache()
    want = wrapper.run(q, kv)
    with pytest.raises(ValueError, match="pos_encoding_mode must be"):
        wrapper.forward(q, kv, pos_encoding_mode="X", sm_scale=7.0)
    with pytest.raises(ValueError, match=r"rope_theta must be positive and finite, got 0.0"):
        wrapper.forward_return_lse(q, kv, rope_theta=0.0, sm_scale=7.0)
    assert torch.equal(wrapper.run(q, kv), want)
    prefill = ragged()
    prefill.plan(ROWS, TOKENS, 4, 2, 64, **F32)
    with pytest.raises(ValueError, match=r"rope_scale must be positive and finite, got -1.0"):
        prefill.forward(torch.randn(4, 4, 64), *torch.randn(2, 9, 2, 64), rope_scale=-1.0)


@pytest.mark.parametrize("planned", [{"causal": True}, {"window_left": 1}])
def test_forward_sees_what_its_own_options_say(planned, monkeypatch):
    """As FlashInfer's: options that are left out have forward()'s default, not the plan's."""
    prefill, q, k = ragged(), torch.randn(4, 4, 64), torch.randn(9, 2, 64)
    prefill.plan(ROWS, TOKENS, 4, 2, 64, **planned, **F32)
    launched = record_launches(monkeypatch)
    for options, launches in (
        (planned, ["run_ragged"]),
        ({}, ["plan", "run_ragged"]),  # What the plan left out must be divided among the SMs, too.
        ({"causal": True}, ["run_ragged"]),
        ({"window_left": 3}, ["run_ragged"]),
    ):
        want, _ = prefill.reference(q, k, k, ROWS, TOKENS, **options)
        torch.testing.assert_close(prefill.forward(q, k, k, **options), want)
        torch.testing.assert_close(prefill.run(q, k, k), want)  # They stay.
        assert launched == [*launches, "run_ragged"]
        launched.clear()


def test_forward_looks_at_options_once_a_plan(monkeypatch):
    """Every layer of a model calls it; a plan and another option in between count all the same."""
    prefill, q, k = ragged(), torch.randn(4, 4, 64), torch.randn(9, 2, 64)
    looked = []
    check = validation.check_rope
    monkeypatch.setattr(validation, "check_rope", lambda *given: looked.append(check(*given)))

    def layer(**options):
        want, _ = prefill.reference(q, k, k, ROWS, TOKENS, **options)
        torch.testing.assert_close(prefill.forward(q, k, k, **options), want)
        torch.testing.assert_close(prefill.forward_return_lse(q, k, k, **options)[0], want)

    for _ in range(2):
        prefill.plan(ROWS, TOKENS, 4, 2, 64, **F32)
        looked.clear()
        for _ in range(3):
            layer(causal=True, sm_scale=0.3)
        assert len(looked) == 1
        layer(causal=True, sm_scale=0.5)
        layer(causal=False, sm_scale=0.5)
        assert len(looked) == 3
    prefill._sm_scale = 0.7  # As engines set it.
    torch.testing.assert_close(
        prefill.run(q, k, k), prefill.reference(q, k, k, ROWS, TOKENS, sm_scale=0.7)[0]
    )
    layer(causal=False, sm_scale=0.5)
    with pytest.raises(ValueError, match="q must have 4 heads"):
        prefill.forward(q[:, :3], k, k, sm_scale=0.5)
    layer(causal=False, sm_scale=0.5)


def test_a_wider_window_of_forward_in_a_graphs_wrapper():
    wrapper = decode(in_graph=True)
    wrapper.plan(*TABLE, *SIZES, window_left=2, **F32)
    q, kv = torch.randn(2, 4, 64), cache()
    for window in (4, -1, 1):
        want, _ = wrapper.reference(q, kv, *TABLE, "NHD", "NONE", window)
        torch.testing.assert_close(wrapper.forward(q, kv, window_left=window), want)


def test_a_failed_forward_with_other_tokens_leaves_the_options():
    prefill, q, k = ragged(), torch.randn(4, 4, 64), torch.randn(9, 2, 64)
    prefill.plan(ROWS, TOKENS, 4, 2, 64, causal=True, **F32)
    want = prefill.run(q, k, k)
    with pytest.raises(ValueError, match="must have 4 heads"):
        prefill.forward(q[:, :3], k, k)
    assert prefill._causal is True
    assert torch.equal(prefill.run(q, k, k), want)
    prefill.plan(ROWS, TOKENS, 4, 2, 64, causal=True, fixed_split_size=64, **F32)
    with pytest.raises(PlanMismatchError, match=r"causal is False and .* Fix: plan again with"):
        prefill.forward(q, k, k)
    assert torch.equal(prefill.run(q, k, k), want)


def test_plans_past_plan_are_for_the_same_heads():
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, q_len_per_req=2, **F32)
    places, empty = (workspace(), wrapper._int_workspace_buffer, None), torch.empty(0)
    plan = functools.partial(wrapper._cached_module.plan, *places, TABLE[0], 2)
    for sizes in ((8, 2, 8, False, -1, 0.0, 64, 64), (4, 2, 8, False, -1, 0.0, 128, 128)):
        with pytest.raises(PlanMismatchError, match=r"must be \[4, 2, 64, 64\] as in plan\(\)"):
            plan(*sizes, empty, empty)
    wrapper._plan_info = plan(4, 2, 8, False, -1, 0.0, 64, 64, empty, empty)
    q, kv = torch.randn(2, 4, 64), cache()
    torch.testing.assert_close(wrapper.run(q, kv), wrapper.reference(q, kv, *TABLE)[0])
    wrapper.reset_workspace_buffer(workspace(), workspace())
    with pytest.raises(PlanMismatchError, match="there is no plan"):
        plan(4, 2, 8, False, -1, 0.0, 64, 64, empty, empty)


# -- memory ---------------------------------------------------------------------------------------


def test_workspaces_are_two():
    wrapper, both = decode(), torch.empty(4096, dtype=torch.uint8)
    message = "int_workspace_buffer must not overlap float_workspace_buffer's memory"
    for floats, ints in ((both, both), (both[:2048], both[1024:]), (both, both[16:32])):
        with pytest.raises(ValueError, match=message):
            wrapper.reset_workspace_buffer(floats, ints)
    wrapper.reset_workspace_buffer(both[:2048], both[2048:])


def test_outputs_have_memory_of_their_own():
    wrapper, kv = decode(), cache()
    wrapper.plan(*TABLE, *SIZES, **F32)
    q, many = torch.randn(2, 4, 64), torch.empty(4096)
    whole = functools.partial(wrapper.run_return_lse, q, kv)
    part = many[:512].view(2, 4, 64)
    for out, lse, message in (
        (part, many[504:512].view(2, 4), "lse must not overlap out's memory"),
        (kv.view(-1)[:512].view(2, 4, 64), None, "out must not overlap paged_kv_cache's memory"),
        (part, kv.view(-1)[:8].view(2, 4), "lse must not overlap paged_kv_cache's memory"),
        (q, None, "out must not overlap q's memory"),
        (part, q.view(-1)[:8].view(2, 4), "lse must not overlap q's memory"),
    ):
        before = kv.clone()
        with pytest.raises(ValueError, match=f"run_paged: {message}"):
            whole(out=out, lse=lse)
        assert torch.equal(kv, before)
    ints = wrapper._int_workspace_buffer
    with pytest.raises(ValueError, match="out must not overlap int_workspace's memory"):
        whole(out=ints[:2048].view(torch.float32).view(2, 4, 64))
    whole(out=part, lse=many[512:520].view(2, 4))


# -- parts of a fixed size ------------------------------------------------------------------------


def test_parts_of_a_fixed_size_need_their_room(monkeypatch):
    seen = []

    def bytes_of(device, shape, lengths):
        seen.append(shape)
        return 4096, 64

    monkeypatch.setattr(kernels, "workspace_bytes", bytes_of)
    words = "float_workspace_buffer must have at least 4096 bytes for fixed_split_size=2, got 1024"
    calls = (
        lambda w, **o: w.plan(*TABLE, *SIZES, **o),
        lambda w, **o: w.plan(ROWS, *TABLE, *SIZES, causal=True, **o),
        lambda w, **o: w.plan(ROWS, TOKENS, 4, 2, 64, causal=True, **o),
    )
    for make, plan in zip((decode, paged, ragged), calls):
        wrapper = make()
        plan(wrapper, **F32)
        plan(wrapper, disable_split_kv=True, **F32)
        assert seen == []
        before = attributes(wrapper)
        with pytest.raises(ValueError, match=words):
            plan(wrapper, fixed_split_size=2, **F32)
        assert attributes(wrapper) == before
        assert seen.pop().fixed_split_size == 2
        wrapper.reset_workspace_buffer(torch.empty(4096, dtype=torch.uint8), workspace()[:48])
        with pytest.raises(ValueError, match="int_workspace_buffer must have at least 64 bytes"):
            plan(wrapper, fixed_split_size=2, **F32)
        wrapper.reset_workspace_buffer(torch.empty(4096, dtype=torch.uint8), workspace())
        plan(wrapper, fixed_split_size=2, **F32)
        seen.clear()


# -- masks of one request -------------------------------------------------------------------------


def test_masks_of_one_request_have_every_pair():
    q, k = torch.randn(3, 4, 64), torch.randn(5, 2, 64)
    prefill = precast.single_prefill_with_kv_cache
    mask = torch.rand(3, 5) < 0.5
    packed = precast.packbits(mask.flatten(), "little")
    for wrong in (mask[:2], mask[:, :4], torch.ones(1, 1).bool(), torch.ones(16).bool()):
        with pytest.raises(ValueError, match="custom_mask must have 15 elements, 3 queries by 5"):
            prefill(q, k, k, custom_mask=wrong)
    with pytest.raises(ValueError, match="packed_custom_mask must have at least 2 elements"):
        prefill(q, k, k, packed_custom_mask=packed[:1])
    want = prefill(q, k, k, custom_mask=mask)
    assert torch.equal(prefill(q, k, k, packed_custom_mask=packed), want)
    transposed = k.transpose(0, 1).contiguous()
    assert torch.equal(prefill(q, transposed, transposed, custom_mask=mask, kv_layout="HND"), want)


@pytest.mark.parametrize("option", ["rope_scale", "rope_theta"])
def test_rope_of_one_request(option):
    q, k = torch.randn(3, 4, 64), torch.randn(5, 2, 64)
    with pytest.raises(ValueError, match=rf"{option} must be positive and finite, got 0"):
        precast.single_prefill_with_kv_cache(q, k, k, **{option: 0})
    with pytest.raises(ValueError, match=rf"{option} must be positive and finite, got nan"):
        precast.single_decode_with_kv_cache(q[0], k, k, **{option: float("nan")})


# -- buffers of the process -----------------------------------------------------------------------


def test_what_a_graph_makes_is_not_kept(monkeypatch):
    """Its memory is written at a replay, and given back with the graph."""
    monkeypatch.setattr(buffers, "_cache_buf", {})
    monkeypatch.setattr(buffers, "is_capturing", lambda device: True)
    cpu = torch.device("cpu")
    slopes, row = buffers.alibi_slopes(6, cpu), buffers._get_range_buf(5, cpu)
    assert buffers._cache_buf == {}
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, q_len_per_req=2, **F32)
    assert not wrapper._plan.hints.keeps_qo_indptr
    monkeypatch.setattr(buffers, "is_capturing", lambda device: False)
    assert torch.equal(buffers.alibi_slopes(6, cpu), slopes)
    assert buffers.alibi_slopes(6, cpu) is buffers.alibi_slopes(6, cpu)
    assert torch.equal(buffers._get_range_buf(5, cpu), row)


@pytest.mark.parametrize("heads", [1, 2, 3, 12, 32, 40, 71, 128])
def test_slopes_are_those_of_their_definition(heads):
    n = 1 << (heads.bit_length() - 1)
    want = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    want += [2.0 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]
    assert torch.equal(buffers.get_alibi_slopes(heads), torch.tensor(want))
