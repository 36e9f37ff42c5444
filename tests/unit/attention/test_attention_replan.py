# SPDX-License-Identifier: Apache-2.0
"""A plan that is rejected, and what a plan leaves to the next: never a part of each."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path

import pytest
import torch
from attention_support import (
    F32,
    I32,
    OTHER_TABLE,
    ROWS,
    SIZES,
    TABLE,
    TOKENS,
    attributes,
    cache,
    decode,
    paged,
    ragged,
    workspace,
)

import precast
from precast._ops.attention import heuristics, kernels
from precast._ops.attention.prefill import plan as plan_of_prefill
from precast.errors import PlanMismatchError

pytestmark = pytest.mark.usefixtures("reference_mode")


# -- a rejected plan ------------------------------------------------------------------------------


def fails(*args):
    raise ValueError("no room")


REJECTED_DECODES = [
    ((*TABLE, 8, 4, 64, 8), {"window_right": 1}, NotImplementedError),
    ((*TABLE, 5, 4, 64, 8), {}, ValueError),
    ((*TABLE, 8, 4, 63, 8), {}, ValueError),
    ((*TABLE, 8, 4, 64, 0), {}, ValueError),
    ((*TABLE, 8, 4, 64, 8), {"kv_data_type": "int32"}, ValueError),
    ((*TABLE, 8, 4, 64, 8), {"pos_encoding_mode": "X"}, ValueError),
    ((*TABLE, 8, 4, 64, 8), {"rope_scale": 0.0}, ValueError),
    ((*TABLE, 8, 4, 64, 8), {"q_len_per_req": 100}, ValueError),
    ((*TABLE[:2], torch.tensor([3, 8, 1], dtype=I32), 8, 4, 64, 8), {}, ValueError),
    ((*TABLE[:2], None, 8, 4, 64, 8), {}, TypeError),
]


@pytest.mark.parametrize(("args", "options", "error"), REJECTED_DECODES)
def test_a_rejected_plan_of_a_decode_leaves_the_one_before(args, options, error):
    wrapper = decode()
    wrapper.plan(*OTHER_TABLE, *SIZES, window_left=5, sm_scale=0.2, **F32)
    q, kv = torch.randn(2, 4, 64), cache()
    before, want = attributes(wrapper), wrapper.run(q, kv)
    with pytest.raises(error):
        wrapper.plan(*args, **{**F32, **options})
    assert attributes(wrapper) == before
    assert torch.equal(wrapper.run(q, kv), want)


def test_a_plan_whose_launch_is_rejected_leaves_the_one_before(monkeypatch):
    wrapper = decode()
    wrapper.plan(*OTHER_TABLE, *SIZES, **F32)
    before = attributes(wrapper)
    with monkeypatch.context() as patch:
        patch.setitem(kernels.plan, (-1,), fails)
        with pytest.raises(ValueError, match="no room"):
            wrapper.plan(*TABLE, 8, 4, 128, 16, sm_scale=3.0, q_len_per_req=2, **F32)
        with pytest.raises(ValueError, match="no room"):
            precast.fast_decode_plan(wrapper, *TABLE, 8, 4, 128, 16, **F32)
    assert attributes(wrapper) == before


def test_a_rejected_plan_by_position_leaves_the_one_before():
    wrapper = decode()
    wrapper.plan(*OTHER_TABLE, *SIZES, **F32)
    before = attributes(wrapper)
    with (
        pytest.warns(DeprecationWarning, match="positionally"),
        pytest.raises(ValueError, match="pos_encoding_mode"),
    ):
        wrapper.plan(*TABLE, 8, 4, 64, 8, "X")
    assert attributes(wrapper) == before


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((ROWS, *TABLE, 5, 4, 64, 8), {}),
        ((ROWS, *TABLE, 8, 4, 64, -1), {}),
        ((ROWS, TABLE[0][:2], *TABLE[1:], 8, 4, 64, 8), {}),
        ((ROWS, *TABLE, 8, 4, 64, 8), {"custom_mask": torch.ones(40).bool()}),
        ((ROWS, *TABLE, 8, 4, 64, 8), {"prefix_len_ptr": torch.tensor([1, 1])}),
        ((ROWS, *TABLE, 8, 4, 64, 8), {"rope_theta": -1.0}),
    ],
)
def test_a_rejected_plan_of_a_prefill_leaves_the_one_before(args, options):
    wrapper, mask = paged(), torch.rand(3 * 8 + 1 * 9) < 0.5
    wrapper.plan(ROWS, *OTHER_TABLE, *SIZES, custom_mask=mask, window_left=6, **F32)
    q, kv = torch.randn(4, 4, 64), cache()
    before, want = attributes(wrapper), wrapper.run(q, kv)
    with pytest.raises(ValueError, match="must"):
        wrapper.plan(*args, **{**F32, **options})
    assert attributes(wrapper) == before
    assert torch.equal(wrapper.run(q, kv), want)


def test_a_rejected_plan_of_ragged_keys_leaves_the_one_before():
    wrapper = ragged()
    wrapper.plan(ROWS, TOKENS, 4, 2, 64, causal=True, **F32)
    q, k = torch.randn(4, 4, 64), torch.randn(9, 2, 64)
    before, want = attributes(wrapper), wrapper.run(q, k, k)
    for args, options in (
        ((ROWS, TOKENS, 6, 4, 64), {}),
        ((ROWS, TOKENS[:2], 8, 4, 64), {}),
        ((ROWS, TOKENS, 8, 4, 64), {"custom_mask": torch.ones(3).bool()}),
    ):
        with pytest.raises(ValueError, match="must"):
            wrapper.plan(*args, **{**F32, **options})
        assert attributes(wrapper) == before
    assert torch.equal(wrapper.run(q, k, k), want)


def test_where_buffers_of_a_graph_are_written_there_is_no_plan(monkeypatch):
    wrapper = decode(in_graph=True)
    wrapper.plan(*OTHER_TABLE, *SIZES, **F32)
    monkeypatch.setitem(kernels.plan, (-1,), fails)
    with pytest.raises(ValueError, match="no room"):
        wrapper.plan(*TABLE, *SIZES, **F32)
    with pytest.raises(PlanMismatchError, match=r"there is no plan. Fix: call plan\(\) first"):
        wrapper.run(torch.randn(2, 4, 64), cache())
    monkeypatch.undo()
    wrapper.plan(*TABLE, *SIZES, **F32)
    q, kv = torch.randn(2, 4, 64), cache()
    torch.testing.assert_close(wrapper.run(q, kv), wrapper.reference(q, kv, *TABLE)[0])


def test_a_plan_for_a_graph_that_is_rejected_before_its_launch_leaves_the_one_before(monkeypatch):
    """All checks come before the buffers are written."""
    wrapper = decode(in_graph=True)
    wrapper.plan(*OTHER_TABLE, *SIZES, **F32)
    q, kv = torch.randn(2, 4, 64), cache()
    before, want = attributes(wrapper), wrapper.run(q, kv)
    with monkeypatch.context() as patch:
        patch.setitem(kernels.pack_plan, (-1,), fails)
        with pytest.raises(ValueError, match="no room"):
            wrapper.plan(*TABLE, *SIZES, sm_scale=3.0, **F32)
    too_long = torch.tensor([0, 2, 3, 3], dtype=I32)
    for table in (too_long, too_long[:2]):
        with pytest.raises(ValueError, match="must have"):
            wrapper.plan(table, *TABLE[1:], *SIZES, **F32)
    assert attributes(wrapper) == before
    assert torch.equal(wrapper.run(q, kv), want)


def test_graphs_of_a_prefill_keep_their_plan_if_a_mask_is_rejected():
    wrapper, mask = paged(in_graph=True), torch.rand(3 * 8 + 1 * 9) < 0.5
    wrapper.plan(ROWS, *OTHER_TABLE, *SIZES, custom_mask=mask, **F32)
    q, kv = torch.randn(4, 4, 64), cache()
    before, want = attributes(wrapper), wrapper.run(q, kv)
    for options, message in (
        ({"custom_mask": mask[:-1]}, "custom_mask must have at least 33 elements .* got 32"),
        (
            {"packed_custom_mask": torch.zeros(4, dtype=torch.uint8)},
            "packed_custom_mask must have at least 5 elements .* got 4",
        ),
        (
            {"packed_custom_mask": torch.zeros(11, dtype=torch.uint8)},
            "custom_mask_buf must have at least 11 elements .* got 10",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.plan(ROWS, *OTHER_TABLE, *SIZES, **options, **F32)
        assert attributes(wrapper) == before
    assert torch.equal(wrapper.run(q, kv), want)
    with pytest.raises(ValueError, match=r"mask_indptr_buf must have shape \[3\], got \[4\]"):
        starts = wrapper._mask_indptr_buf
        wrapper._mask_indptr_buf = torch.zeros(4, dtype=I32)
        wrapper.plan(ROWS, *OTHER_TABLE, *SIZES, custom_mask=mask, **F32)
    wrapper._mask_indptr_buf = starts
    # One that is too long is as good as its beginning.
    wrapper.plan(ROWS, *OTHER_TABLE, *SIZES, custom_mask=mask.repeat(2), **F32)
    assert torch.equal(wrapper.run(q, kv), want)


# -- what a plan leaves to the next ---------------------------------------------------------------


def test_items_of_the_plan_before_are_gone():
    wrapper = ragged()
    places = torch.zeros(2, 5, dtype=torch.int32)
    items = {"prefix_len_ptr": torch.tensor([1, 1]), "token_pos_in_items_ptr": places.view(-1)}
    items["token_pos_in_items_len"] = 5
    longest = torch.tensor([3, 3])
    wrapper.plan(ROWS, TOKENS, 4, 2, 64, **items, max_item_len_ptr=longest, **F32)
    assert wrapper._max_item_len_ptr is not None
    wrapper.plan(ROWS, TOKENS, 4, 2, 64, **items, **F32)
    assert wrapper._max_item_len_ptr is None
    wrapper.plan(ROWS, TOKENS, 4, 2, 64, **F32)
    assert wrapper._prefix_len_ptr is wrapper._token_pos_in_items_ptr is None
    assert wrapper._token_pos_in_items_len == 0


def test_requests_may_be_longer_than_the_rows_of_their_items():
    """As if zeros were behind the rows; one row without a length is for every request."""
    wrapper, (q, k) = ragged(), (torch.randn(4, 4, 64), torch.randn(9, 2, 64))
    prefixes = torch.tensor([1, 2])

    def run(rows, size):
        places = torch.tensor(rows)
        wrapper.plan(
            *(ROWS, TOKENS, 4, 2, 64),
            prefix_len_ptr=prefixes,
            token_pos_in_items_ptr=places,
            token_pos_in_items_len=size,
            **F32,
        )
        want, _ = wrapper.reference(
            *(q, k, k, ROWS, TOKENS),
            prefix_len_ptr=prefixes,
            token_pos_in_items_ptr=places.to(torch.uint16),
            token_pos_in_items_len=size,
        )
        out = wrapper.run(q, k, k)
        torch.testing.assert_close(out, want)
        return out

    assert torch.equal(run([1, 2, 1, 2], 2), run([1, 2, 0, 0, 1, 2, 0, 0], 4))
    assert torch.equal(run([1, 2], 0), run([1, 2, 1, 2], 2))
    assert not torch.equal(run([1, 2], 0), run([1, 2, 0, 0], 2))


@pytest.mark.parametrize(("count", "size"), [(7, 4), (4, 4), (8, -1)])
def test_every_request_has_items(count, size):
    wrapper = ragged()
    wrapper.plan(ROWS, TOKENS, 4, 2, 64, **F32)
    before, places = attributes(wrapper), torch.zeros(count, dtype=torch.int32)
    words = rf"must have token_pos_in_items_len .* the 2 requests, got {count} in all and {size}"
    with pytest.raises(ValueError, match=words):
        wrapper.plan(
            *(ROWS, TOKENS, 4, 2, 64),
            prefix_len_ptr=torch.tensor([1, 1]),
            token_pos_in_items_ptr=places,
            token_pos_in_items_len=size,
            **F32,
        )
    assert attributes(wrapper) == before


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (4, r"token_pos must have at least 8 elements, got .*\[6\]"),
        (-1, "token_pos_len must not be negative, got -1"),
    ],
)
def test_items_that_an_engine_sets_are_checked_by_the_next_run(size, words):
    wrapper = ragged()
    items = {"prefix_len_ptr": torch.tensor([1, 1]), "token_pos_in_items_ptr": torch.zeros(6)}
    wrapper.plan(ROWS, TOKENS, 4, 2, 64, **items, token_pos_in_items_len=3, **F32)
    wrapper._token_pos_in_items_len = size
    with pytest.raises(ValueError, match=words):
        wrapper.run(torch.randn(4, 4, 64), *torch.randn(2, 9, 2, 64))


def test_a_fast_plan_gives_outputs_of_its_queries_dtype():
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, q_data_type="bfloat16")
    precast.fast_decode_plan(wrapper, *TABLE, *SIZES, q_data_type="float16")
    assert wrapper._cached_o_data_type is torch.float16
    wrapper.plan(*TABLE, *SIZES, q_data_type="bfloat16", o_data_type="float32")
    precast.fast_decode_plan(wrapper, *TABLE, *SIZES, q_data_type="bfloat16")
    assert wrapper._cached_o_data_type is torch.float32


def test_a_split_that_is_off_has_no_tile_of_its_own(monkeypatch):
    """-1 is what engines pass for none."""
    wrapper, tiles = ragged(), []
    monkeypatch.setattr(heuristics, "choose", lambda *args: 16)
    monkeypatch.setattr(heuristics, "largest", lambda *args: 64)
    for size in (None, -1, 0, 8):
        wrapper.plan(ROWS, TOKENS, 4, 2, 64, fixed_split_size=size, **F32)
        tiles.append(wrapper._plan.shape.block_m)
    assert tiles == [16, 16, 16, 64]


@pytest.fixture
def unknown(monkeypatch):
    """Make a plan as with lengths on the GPU: the host knows no number of queries."""
    monkeypatch.setattr(plan_of_prefill, "total_and_longest", lambda *args: (None, None))

    def plan(wrapper, rows):
        wrapper.plan(rows, rows, 8, 2, 64, **F32)
        return wrapper._plan.shape.block_m

    return plan


def test_the_first_run_knows_the_tile_of_lengths_on_the_gpu(unknown):
    wrapper, tiles = ragged(), []
    for count, before, after in ((40, 64, 128), (41, 128, 128), (1, 128, 16), (1, 16, 16)):
        rows = torch.tensor([0, count, 2 * count])
        q, k, v = torch.randn(2 * count, 8, 64), *torch.randn(2, 2 * count, 2, 64)
        assert unknown(wrapper, rows) == before, "as in the run before"
        want, _ = wrapper.reference(q, k, v, rows, rows)
        for _ in range(2):
            torch.testing.assert_close(wrapper.run(q, k, v), want)
            tiles.append(wrapper._plan.shape.block_m)
        assert tiles[-2:] == [after, after]


def test_a_captured_run_keeps_its_tile(unknown, monkeypatch):
    wrapper, rows = ragged(), torch.tensor([0, 40, 80])
    assert unknown(wrapper, rows) == 64
    monkeypatch.setattr(wrapper, "_is_capturing", lambda: True)
    wrapper.run(torch.randn(80, 8, 64), *torch.randn(2, 80, 2, 64))
    assert wrapper._plan.shape.block_m == 64


def test_a_wrapper_for_graphs_keeps_the_tile_of_its_first_run(unknown):
    buffers = [torch.zeros(3, dtype=torch.int32) for _ in range(2)]
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(), use_cuda_graph=True, qo_indptr_buf=buffers[0], kv_indptr_buf=buffers[1]
    )
    for count, tile in ((40, 128), (1, 128)):
        unknown(wrapper, torch.tensor([0, count, 2 * count]))
        wrapper.run(torch.randn(2 * count, 8, 64), *torch.randn(2, 2 * count, 2, 64))
        assert wrapper._plan.shape.block_m == tile


def test_a_deprecated_call_is_where_the_warning_is():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode().plan(*TABLE, *SIZES, "NONE", -1, None, "float32")
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


def test_a_plan_keeps_no_block_of_the_plans_before():
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, **F32)
    empty, blocks = torch.empty(0), []
    for _ in range(3):
        blocks.append(weakref.ref(wrapper._plan.block))
        wrapper._cached_module.plan(
            *(workspace(), wrapper._int_workspace_buffer, None),
            *(TABLE[0], 2, 4, 2, 8, False, -1, 0.0, 64, 64, empty, empty),
        )
    assert [block() for block in blocks] == [None] * 3
