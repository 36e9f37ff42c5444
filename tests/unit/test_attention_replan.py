# SPDX-License-Identifier: Apache-2.0
"""A plan that is refused, and runs that are not what was planned: never a part of each."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch

import precast
from precast._attention import kernels, words
from precast.errors import CacheLayoutError, PlanMismatchError

I32 = torch.int32
TABLE = (
    torch.tensor([0, 2, 3], dtype=I32),
    torch.tensor([4, 1, 0], dtype=I32),
    torch.tensor([3, 8], dtype=I32),
)
OTHER_TABLE = (
    torch.tensor([0, 1, 3], dtype=I32),
    torch.tensor([7, 2, 5], dtype=I32),
    torch.tensor([8, 1], dtype=I32),
)
ROWS, TOKENS = torch.tensor([0, 3, 4], dtype=I32), torch.tensor([0, 5, 9], dtype=I32)
F32 = {"q_data_type": "float32"}
SIZES = (4, 2, 64, 8)


@pytest.fixture(autouse=True)
def _reference_mode():
    torch.manual_seed(4)
    with precast.reference_mode():
        yield


def workspace():
    return torch.empty(1024, dtype=torch.uint8)


def decode(in_graph=False):
    buffers = {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": torch.zeros(3, dtype=I32),
        "paged_kv_indices_buffer": torch.zeros(3, dtype=I32),
        "paged_kv_last_page_len_buffer": torch.zeros(2, dtype=I32),
    }
    return precast.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_tensor_cores=True, **(buffers if in_graph else {})
    )


def paged(in_graph=False):
    sizes = {"qo_indptr_buf": 3, "paged_kv_indptr_buf": 3, "paged_kv_indices_buf": 3}
    sizes |= {"paged_kv_last_page_len_buf": 2, "mask_indptr_buf": 3}
    buffers = {name: torch.zeros(size, dtype=I32) for name, size in sizes.items()}
    buffers["custom_mask_buf"] = torch.zeros(10, dtype=torch.uint8)
    return precast.BatchPrefillWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=in_graph, **(buffers if in_graph else {})
    )


def ragged():
    return precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())


def cache(kv_heads=2, page_size=8):
    return torch.randn(8, 2, page_size, kv_heads, 64)


def attributes(wrapper):
    """All of a wrapper; tensors by what is in them."""
    return {
        name: (id(value), value.tolist())
        if isinstance(value, torch.Tensor) and value.numel() < 100
        else value
        for name, value in vars(wrapper).items()
        if name != "_overwritten"
    }


# -- a refused plan -------------------------------------------------------------------------------


def fails(*args):
    raise ValueError("no room")


DECODE_REFUSALS = [
    ((*TABLE, 8, 4, 64, 8), {"window_right": 1}, NotImplementedError),
    ((*TABLE, 5, 4, 64, 8), {}, ValueError),
    ((*TABLE, 8, 4, 63, 8), {}, ValueError),
    ((*TABLE, 8, 4, 64, 0), {}, ValueError),
    ((*TABLE, 8, 4, 64, 8), {"kv_data_type": "int32"}, ValueError),
    ((*TABLE, 8, 4, 64, 8), {"pos_encoding_mode": "X"}, ValueError),
    ((*TABLE, 8, 4, 64, 8), {"rope_scale": 0.0}, ValueError),
    ((*TABLE, 8, 4, 64, 8), {"q_len_per_req": 100}, ValueError),
    ((*TABLE[:2], torch.tensor([3, 8, 1], dtype=I32), 8, 4, 64, 8), {}, ValueError),
    ((*TABLE[:2], None, 8, 4, 64, 8), {}, AttributeError),
]


@pytest.mark.parametrize(("args", "options", "error"), DECODE_REFUSALS)
def test_a_refused_plan_of_a_decode_leaves_the_one_before(args, options, error):
    wrapper = decode()
    wrapper.plan(*OTHER_TABLE, *SIZES, window_left=5, sm_scale=0.2, **F32)
    q, kv = torch.randn(2, 4, 64), cache()
    before, want = attributes(wrapper), wrapper.run(q, kv)
    with pytest.raises(error):
        wrapper.plan(*args, **{**F32, **options})
    assert attributes(wrapper) == before
    assert torch.equal(wrapper.run(q, kv), want)


def test_a_plan_whose_launch_is_refused_leaves_the_one_before(monkeypatch):
    wrapper = decode()
    wrapper.plan(*OTHER_TABLE, *SIZES, **F32)
    before = attributes(wrapper)
    with monkeypatch.context() as patch:
        patch.setitem(kernels.plan, wrapper._device_key, fails)
        with pytest.raises(ValueError, match="no room"):
            wrapper.plan(*TABLE, 8, 4, 128, 16, sm_scale=3.0, q_len_per_req=2, **F32)
        with pytest.raises(ValueError, match="no room"):
            precast.fast_decode_plan(wrapper, *TABLE, 8, 4, 128, 16, **F32)
    assert attributes(wrapper) == before


def test_a_refused_plan_by_position_leaves_the_one_before():
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
def test_a_refused_plan_of_a_prefill_leaves_the_one_before(args, options):
    wrapper, mask = paged(), torch.rand(3 * 8 + 1 * 9) < 0.5
    wrapper.plan(ROWS, *OTHER_TABLE, *SIZES, custom_mask=mask, window_left=6, **F32)
    q, kv = torch.randn(4, 4, 64), cache()
    before, want = attributes(wrapper), wrapper.run(q, kv)
    with pytest.raises(ValueError, match="must"):
        wrapper.plan(*args, **{**F32, **options})
    assert attributes(wrapper) == before
    assert torch.equal(wrapper.run(q, kv), want)


def test_a_refused_plan_of_ragged_keys_leaves_the_one_before():
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
    for export in (kernels.plan, kernels.fill_and_plan):
        monkeypatch.setitem(export, wrapper._device_key, fails)
    with pytest.raises(ValueError, match="no room"):
        wrapper.plan(*TABLE, *SIZES, **F32)
    with pytest.raises(PlanMismatchError, match=r"there is no plan. Fix: call plan\(\) first"):
        wrapper.run(torch.randn(2, 4, 64), cache())
    monkeypatch.undo()
    wrapper.plan(*TABLE, *SIZES, **F32)
    q, kv = torch.randn(2, 4, 64), cache()
    torch.testing.assert_close(wrapper.run(q, kv), wrapper.reference(q, kv, *TABLE)[0])


def test_where_the_plan_is_written_there_is_no_other(monkeypatch):
    wrapper = decode()
    wrapper.plan(*OTHER_TABLE, *SIZES, **F32)
    monkeypatch.setattr(type(wrapper), "_make_qo_indptr", fails)
    with pytest.raises(ValueError, match="no room"):
        wrapper.plan(*TABLE, *SIZES, q_len_per_req=2, **F32)
    with pytest.raises(PlanMismatchError, match="there is no plan"):
        wrapper.run(torch.randn(2, 4, 64), cache())


def test_graphs_of_a_prefill_keep_their_plan_if_a_mask_is_refused():
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


def test_every_request_has_items():
    wrapper = ragged()
    places = torch.zeros(7, dtype=torch.int32)
    wrapper.plan(
        *(ROWS, TOKENS, 4, 2, 64),
        prefix_len_ptr=torch.tensor([1, 1]),
        token_pos_in_items_ptr=places,
        token_pos_in_items_len=4,
        **F32,
    )
    q, k = torch.randn(4, 4, 64), torch.randn(9, 2, 64)
    with pytest.raises(ValueError, match=r"token_pos must have at least 8 elements, got .*\[7\]"):
        wrapper.run(q, k, k)


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
    wrapper, seen = ragged(), []
    monkeypatch.setattr(
        wrapper, "_choose_tile", lambda q_len, rows, invariant: seen.append(invariant) or 16
    )
    for size in (None, -1, 0, 8):
        wrapper.plan(ROWS, TOKENS, 4, 2, 64, fixed_split_size=size, **F32)
    assert seen == [False, False, False, True, True]


def test_a_deprecated_call_is_where_the_warning_is():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode().plan(*TABLE, *SIZES, "NONE", -1, None, "float32")
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


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
    with pytest.raises(CacheLayoutError, match="keys and values must be a torch"):
        wrapper.run(torch.randn(2, 4, 64), wrong)
    of_tokens = ragged()
    of_tokens.plan(ROWS, TOKENS, 4, 2, 64, **F32)
    with pytest.raises(CacheLayoutError, match="keys and values must be a torch"):
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


def test_options_of_forward_that_are_refused_leave_the_plan():
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, **F32)
    q, kv = torch.randn(2, 4, 64), cache()
    want = wrapper.run(q, kv)
    with pytest.raises(ValueError, match="pos_encoding_mode must be"):
        wrapper.forward(q, kv, pos_encoding_mode="X", sm_scale=7.0)
    with pytest.raises(ValueError, match=r"rope_theta must be positive, got 0.0"):
        wrapper.forward_return_lse(q, kv, rope_theta=0.0, sm_scale=7.0)
    assert torch.equal(wrapper.run(q, kv), want)
    prefill = ragged()
    prefill.plan(ROWS, TOKENS, 4, 2, 64, **F32)
    with pytest.raises(ValueError, match=r"rope_scale must be positive, got -1.0"):
        prefill.forward(torch.randn(4, 4, 64), *torch.randn(2, 9, 2, 64), rope_scale=-1.0)


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

    def bytes_of(device, *options):
        seen.append(options)
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
        assert seen.pop()[-2:] == (2, False)
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
    turned = k.transpose(0, 1).contiguous()
    assert torch.equal(prefill(q, turned, turned, custom_mask=mask, kv_layout="HND"), want)


@pytest.mark.parametrize("option", ["rope_scale", "rope_theta"])
def test_rope_of_one_request(option):
    q, k = torch.randn(3, 4, 64), torch.randn(5, 2, 64)
    with pytest.raises(ValueError, match=rf"{option} must be positive, got 0"):
        precast.single_prefill_with_kv_cache(q, k, k, **{option: 0})
    with pytest.raises(ValueError, match=rf"{option} must be positive, got nan"):
        precast.single_decode_with_kv_cache(q[0], k, k, **{option: float("nan")})


# -- buffers of the process -----------------------------------------------------------------------


def test_what_a_graph_makes_is_not_kept(monkeypatch):
    """Its memory is written at a replay, and given back with the graph."""
    monkeypatch.setattr(words, "_cache_buf", {})
    monkeypatch.setattr(words, "is_capturing", lambda device: True)
    cpu = torch.device("cpu")
    slopes, row = words.alibi_slopes(6, cpu), words._get_range_buf(5, cpu)
    assert words._cache_buf == {}
    wrapper = decode()
    wrapper.plan(*TABLE, *SIZES, q_len_per_req=2, **F32)
    assert wrapper._qo_indptr_of == (0, 0)
    monkeypatch.setattr(words, "is_capturing", lambda device: False)
    assert torch.equal(words.alibi_slopes(6, cpu), slopes)
    assert words.alibi_slopes(6, cpu) is words.alibi_slopes(6, cpu)
    assert torch.equal(words._get_range_buf(5, cpu), row)


@pytest.mark.parametrize("heads", [1, 2, 3, 12, 32, 40, 71, 128])
def test_slopes_are_those_of_their_definition(heads):
    n = 1 << (heads.bit_length() - 1)
    want = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    want += [2.0 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]
    assert torch.equal(words.get_alibi_slopes(heads), torch.tensor(want))
