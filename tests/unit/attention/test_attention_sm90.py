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
    monkeypatch.setattr(sm90, "_is_hopper", lambda device: True)


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
