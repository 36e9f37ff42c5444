# SPDX-License-Identifier: Apache-2.0
"""Which calls the kernels for Hopper compute; a CPU stands in for the GPU, in reference mode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attention_support import record_launches, workspace

import precast
from precast._ops.attention import sm90
from precast._ops.attention.functional import geometry
from precast._ops.attention.plan import PlanShape

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CPU = torch.device("cpu")
SHAPE = PlanShape(2, -1, 0, 16, 32, 8, 128, 128, 2, 64)
ROWS, TOKENS = torch.tensor([0, 40, 70]), torch.tensor([0, 50, 90])

pytestmark = pytest.mark.usefixtures("reference_mode")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(sm90, "is_hopper", lambda device: True)


def ragged(**options):
    return precast.BatchPrefillWithRaggedKVCacheWrapper(workspace(), **options)


def planned(wrapper, heads=4, kv_heads=2, head_dim=64, **options):
    options = {"q_data_type": BF16, "kv_data_type": BF16, **options}
    wrapper.plan(ROWS, TOKENS, heads, kv_heads, head_dim, **options)
    return wrapper._plan.shape


def tensors(head_dim=64):
    q = torch.randn(70, 4, head_dim, dtype=BF16)
    return q, *torch.randn(2, 90, 2, head_dim, dtype=BF16)


@pytest.mark.parametrize(
    ("group", "head_dim_vo", "rows"),
    [(1, 128, 128), (4, 128, 128), (5, 128, 125), (7, 128, 126), (7, 64, 189), (48, 256, 96)],
)
def test_a_tile_has_whole_groups_of_heads(group, head_dim_vo, rows):
    assert sm90.block_m(SHAPE._replace(num_qo_heads=8 * group, head_dim_vo=head_dim_vo)) == rows


@pytest.mark.parametrize(
    "other",
    [
        {"head_dim_qk": 80, "head_dim_vo": 80},
        {"head_dim_qk": 192, "head_dim_vo": 192},
        {"num_qo_heads": 8 * 65},
    ],
)
def test_what_the_kernels_lack_is_for_others(other):
    assert sm90.runs((BF16, BF16), SHAPE, CPU)
    assert not sm90.runs((BF16, BF16), SHAPE._replace(**other), CPU)


def test_keys_are_of_the_dtype_of_queries_or_e4m3():
    for dtypes in ((BF16, F16), (F16, torch.float8_e5m2), (torch.float32, torch.float32)):
        assert not sm90.runs(dtypes, SHAPE, CPU)
    for dtypes in ((F16, F16), (F16, E4M3), (BF16, E4M3)):
        assert sm90.runs(dtypes, SHAPE, CPU)


def test_keys_of_8_bits_have_tiles_of_two_warpgroups_and_pages_of_any_size():
    shape = SHAPE._replace(head_dim_qk=64, head_dim_vo=64, kv_bytes=1, page_size=1)
    assert sm90.block_m(shape) == 128
    assert sm90.suits((BF16, E4M3), shape, None, CPU)


def test_short_requests_are_for_smaller_tiles():
    assert not sm90.suits((BF16, BF16), SHAPE, 4, CPU)  # 16 packed rows
    assert sm90.suits((BF16, BF16), SHAPE, 5, CPU)
    assert sm90.runs((BF16, BF16), SHAPE, CPU)
    for dtypes, others in (
        ((BF16, E4M3), {"kv_bytes": 1}),
        ((BF16, BF16), {"head_dim_qk": 256, "head_dim_vo": 256}),
    ):
        shape = SHAPE._replace(**others)
        assert not sm90.suits(dtypes, shape, 16, CPU)
        assert sm90.suits(dtypes, shape, 17, CPU)


@pytest.mark.parametrize("page_size", [0, 1, 20, 24])
def test_pages_are_of_any_size(page_size):
    assert sm90.suits((BF16, BF16), SHAPE._replace(page_size=page_size), None, CPU)


def test_other_gpus_have_no_such_kernels(monkeypatch):
    monkeypatch.undo()
    assert not sm90.runs((BF16, BF16), SHAPE, CPU)


@pytest.mark.parametrize(
    "options",
    [
        {"q_data_type": torch.float32, "kv_data_type": torch.float32},
        {"kv_data_type": torch.float8_e5m2},
        {"head_dim": 80},
    ],
)
def test_plans_that_need_more_run_elsewhere(options):
    assert planned(ragged(), **options).sm90 is False


MASK = torch.rand(40 * 50 + 30 * 40, generator=torch.Generator().manual_seed(1)) < 0.7
#: 9 tokens of a prefix, then items of 20, for both requests; the last token of an item is 0.
PLACES = torch.arange(41, dtype=torch.int16) % 21


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_left": 7},
        {"sm_scale": -0.1},
        {"sm_scale": 0.0},
        {"causal": True, "logits_soft_cap": 30.0},
        {"pos_encoding_mode": "ALIBI"},
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"custom_mask": MASK},
        {
            "prefix_len_ptr": torch.tensor([9, 9], dtype=torch.uint32),
            "token_pos_in_items_ptr": torch.cat((PLACES, PLACES)),
            "token_pos_in_items_len": 41,
        },
    ],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("backend", ["auto", "fa3"])
def test_plans_of_all_scores_run_on_hopper(options, backend, monkeypatch):
    wrapper = ragged(backend=backend)
    assert planned(wrapper, **options).sm90 is True
    launched = record_launches(monkeypatch)
    q, k, v = tensors()
    want, _ = wrapper.reference(q, k, v, ROWS, TOKENS, **options)
    torch.testing.assert_close(wrapper.run(q, k, v), want)
    assert launched == ["run_ragged_sm90"]


def test_fa2_is_the_kernels_of_every_gpu():
    assert planned(ragged(backend="fa2")).sm90 is False


def test_a_batch_that_must_not_matter_does_not_choose_the_kernels():
    """Results with a split size must not depend on the other requests."""
    wrapper = ragged()
    short = torch.tensor([0, 1, 2])
    options = {"q_data_type": BF16, "kv_data_type": BF16}
    wrapper.plan(short, TOKENS, 4, 2, 64, **options)
    assert wrapper._plan.shape.sm90 is False
    wrapper.plan(short, TOKENS, 4, 2, 64, fixed_split_size=64, **options)
    assert wrapper._plan.shape.sm90 is True


def test_other_scores_than_the_plan_had_need_no_new_one(monkeypatch):
    wrapper, (q, k, v) = ragged(), tensors()
    planned(wrapper)
    launched = record_launches(monkeypatch)
    want, _ = wrapper.reference(q, k, v, ROWS, TOKENS, logits_soft_cap=5.0)
    torch.testing.assert_close(wrapper.forward(q, k, v, logits_soft_cap=5.0), want)
    wrapper._logits_soft_cap = 5.0  # as engines set it
    torch.testing.assert_close(wrapper.run(q, k, v), want)
    assert launched == ["run_ragged_sm90", "run_ragged_sm90"]


def test_a_graph_keeps_the_kernels_of_its_first_plan():
    buffers = [torch.zeros(3, dtype=torch.int32) for _ in range(2)]
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(), use_cuda_graph=True, qo_indptr_buf=buffers[0], kv_indptr_buf=buffers[1]
    )
    assert planned(wrapper).sm90 is True
    options = {"q_data_type": BF16, "kv_data_type": BF16}
    wrapper.plan(torch.tensor([0, 1, 2]), TOKENS, 4, 2, 64, **options)
    assert wrapper._plan.shape.sm90 is True


def test_a_decode_of_many_rows_runs_on_hopper():
    table = torch.tensor([0, 5]), torch.arange(5), torch.tensor([8])
    for q_len, expected in ((1, False), (40, True)):
        wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
        wrapper.plan(*table, 4, 2, 64, 8, q_data_type=BF16, kv_data_type=BF16, q_len_per_req=q_len)
        assert wrapper._plan.shape.sm90 is expected


def test_functional_calls_of_all_scores_run_on_hopper():
    call = SimpleNamespace(
        query=torch.empty(70, 8, 64, dtype=BF16),
        k=torch.empty(90, 2, 64, dtype=BF16),
        v=torch.empty(90, 2, 64, dtype=BF16),
        q_bounds=ROWS,
        q_len=40,
        causal=True,
        is_alibi=True,
        window_left=-1,
        logits_soft_cap=5.0,
        sm_scale=0.0,
    )
    assert not geometry.is_plain(call)
    assert geometry.shape_of(call).sm90 is True


# -- queries, keys and values in e4m3 -------------------------------------------------------------

FP8 = {"q_data_type": E4M3, "kv_data_type": E4M3, "o_data_type": BF16}


def fp8_tensors(head_dim=64):
    return tuple(x.to(E4M3) for x in tensors(head_dim))


@pytest.mark.parametrize(
    ("options", "export"),
    [
        ({}, "run_ragged_sm90_fp8"),
        ({"causal": True, "logits_soft_cap": 9.0}, "run_ragged_sm90_fp8"),
        ({"custom_mask": MASK}, "run_ragged_sm90_fp8"),
        ({"o_data_type": torch.float32}, "run_ragged_sm90_fp8"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "run_ragged_sm90"),
        ({"q_data_type": torch.float8_e5m2}, "run_ragged_sm90"),
        ({"kv_data_type": BF16}, "run_ragged_sm90"),
        ({"head_dim": 96}, "run_ragged_sm90"),
        ({"head_dim": 80}, "run_ragged"),
    ],
    ids=str,
)
def test_queries_of_e4m3_are_multiplied_or_converted(options, export, monkeypatch):
    options = {**FP8, **options}
    head_dim = options.get("head_dim", 64)
    wrapper = ragged()
    planned(wrapper, **options)
    launched = record_launches(monkeypatch)
    x = tensors(head_dim)
    q, k, v = x[0].to(options["q_data_type"]), *(y.to(options["kv_data_type"]) for y in x[1:])
    scores = {k: v for k, v in options.items() if "data_type" not in k and k != "head_dim"}
    want, _ = wrapper.reference(q.to(BF16), k, v, ROWS, TOKENS, **scores)
    out = wrapper.run(q, k, v)
    assert launched == [export]
    assert out.dtype is options["o_data_type"]
    torch.testing.assert_close(out.float(), want.float(), atol=1e-2, rtol=1e-2)


def test_a_run_of_fp8_may_rotate_where_its_plan_did_not(monkeypatch):
    wrapper, (q, k, v) = ragged(), fp8_tensors()
    planned(wrapper, **FP8)
    launched = record_launches(monkeypatch)
    want, _ = wrapper.reference(q.to(BF16), k, v, ROWS, TOKENS, pos_encoding_mode="ROPE_LLAMA")
    out = wrapper.forward(q, k, v, pos_encoding_mode="ROPE_LLAMA")
    torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)
    assert launched == ["run_ragged_sm90"]


def test_queries_of_e4m3_of_short_requests_are_converted(monkeypatch):
    wrapper, (q, k, v) = ragged(), fp8_tensors()
    short = torch.tensor([0, 1, 2])
    wrapper.plan(short, TOKENS, 4, 2, 64, **FP8)
    launched = record_launches(monkeypatch)
    wrapper.run(q[:2], k, v)
    assert launched == ["run_ragged"]


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("is_by_position", [False, True])
def test_scales_of_heads(is_hopper, is_by_position, monkeypatch):
    """A kernel multiplies them, or they go into the converted queries and the output."""
    monkeypatch.setattr(sm90, "is_hopper", lambda device: is_hopper)
    wrapper, (q, k, v) = ragged(), fp8_tensors()
    planned(wrapper, **FP8)
    scales = torch.rand(4) + 0.5, torch.rand(2) + 0.5, torch.rand(2) + 0.5
    launched = record_launches(monkeypatch)
    if is_by_position:
        out = wrapper.run(q, k, v, *scales)
    else:
        out = wrapper.run(q, k, v, **dict(zip(("q_scale", "k_scale", "v_scale"), scales)))
    assert launched == ["run_ragged_sm90_fp8" if is_hopper else "run_ragged"]
    scaled = q.float() * (scales[0] * scales[1].repeat_interleave(2))[:, None]
    want, _ = wrapper.reference(scaled, k.float(), v.float(), ROWS, TOKENS)
    want = want * scales[2].repeat_interleave(2)[:, None]
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)


def test_scales_by_position_and_by_name_are_an_error():
    wrapper, (q, k, v) = ragged(), fp8_tensors()
    planned(wrapper, **FP8)
    one, out = torch.ones(1), torch.full(q.shape, 7.0, dtype=BF16)
    with pytest.raises(ValueError, match="v_scale was given by name and by position"):
        wrapper.run(q, k, v, one, one, one, v_scale=2.0, out=out)
    with pytest.raises(TypeError, match="takes no further arguments by position, got 2"):
        wrapper.run(q, k, v, one, one, out=out)
    with pytest.raises(ValueError, match=r"k_scale must be one number or have shape \[2\]"):
        wrapper.run(q, k, v, k_scale=torch.ones(3), out=out)
    assert out.eq(7).all()


@pytest.mark.parametrize(("tokens", "export"), [(70, "run_ragged_sm90_fp8"), (5, "run_ragged")])
def test_one_request_in_fp8(tokens, export, monkeypatch):
    q, k, v = fp8_tensors()
    q = q[:tokens]
    scales = torch.rand(4) + 0.5, torch.rand(2) + 0.5, torch.rand(2) + 0.5
    launched = record_launches(monkeypatch)
    out = precast.single_prefill_with_kv_cache(q, k, v, *scales, o_dtype=BF16, v_scale=2.0)
    assert launched == [export]
    scaled = q.float() * (scales[0] * scales[1].repeat_interleave(2))[:, None]
    want = precast.single_prefill_with_kv_cache(scaled, k.float(), v.float())
    want = want * (2 * scales[2]).repeat_interleave(2)[:, None]
    torch.testing.assert_close(out.float(), want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("option", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_a_number_beside_scales_of_heads_must_be_finite(option, value):
    q, k, v = fp8_tensors()
    scales = torch.ones(4), torch.ones(2), torch.ones(2)
    with pytest.raises(
        ValueError, match=f"single_prefill_with_kv_cache: {option} must be a finite"
    ):
        precast.single_prefill_with_kv_cache(q, k, v, *scales, o_dtype=BF16, **{option: value})


@pytest.mark.parametrize(("q_len", "export"), [(40, "run_paged_sm90_fp8"), (1, "run_paged")])
def test_context_attention_in_fp8(q_len, export, monkeypatch):
    q = torch.randn(2 * q_len, 4, 64).to(E4M3)
    cache = torch.randn(8, 2, 2, 16, 64).to(E4M3)
    lens = torch.tensor([50, 60], dtype=torch.int32)
    bounds = torch.tensor([0, q_len, 2 * q_len], dtype=torch.int32)
    kv_bounds = torch.tensor([0, 50, 110], dtype=torch.int32)
    call = (
        *(torch.zeros(1 << 22, dtype=torch.uint8), torch.arange(8, dtype=torch.int32).view(2, 4)),
        *(lens, q_len, 60, 0.125, 1.0, 2, bounds, kv_bounds),
    )
    launched = record_launches(monkeypatch)
    function = precast.prefill.trtllm_batch_context_with_kv_cache
    out = function(q, cache, *call, out_dtype=BF16)
    want = function(q.to(BF16), cache, *call)
    assert launched[0] == export
    assert out.dtype is BF16
    torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)
