# SPDX-License-Identifier: Apache-2.0
"""The wrappers as engines use them: names, signatures, attributes, buffers and replanning."""

from __future__ import annotations

import functools
import inspect
import warnings

import pytest
import torch

import precast
from precast._ops.attention import kernels
from precast._ops.attention.plan import read_block
from precast.prefill import single_prefill_with_kv_cache_reference

I32 = torch.int32

pytestmark = pytest.mark.usefixtures("reference_mode")


@pytest.fixture
def workspace():
    return torch.empty(1024, dtype=torch.uint8)


TABLE = (
    torch.tensor([0, 2, 3], dtype=I32),
    torch.tensor([4, 1, 0, 7], dtype=I32),
    torch.tensor([3, 8], dtype=I32),
)


def decode_call(dtype=torch.float32, q_len=1):
    return torch.randn(2 * q_len, 4, 64, dtype=dtype), torch.randn(8, 2, 8, 2, 64, dtype=dtype)


def planned(workspace, **options):
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
    wrapper.plan(*TABLE, 4, 2, 64, 8, **{"q_data_type": "float32", **options})
    return wrapper


PARAMETERS = {
    "BatchDecodeWithPagedKVCacheWrapper": (
        "float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
        "paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args"
    ),
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": (
        "workspace_buffer indptr_buffer indices_buffer last_page_len_buffer kv_layout "
        "use_tensor_cores"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.plan": (
        "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
        "deprecated_positional_args pos_encoding_mode window_left window_right logits_soft_cap "
        "q_data_type kv_data_type o_data_type data_type sm_scale rope_scale rope_theta "
        "non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req "
        "is_causal"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.run": (
        "self q paged_kv_cache args q_scale k_scale v_scale out lse return_lse enable_pdl "
        "window_left sinks q_len_per_req skip_softmax_threshold_scale_factor kv_cache_sf"
    ),
    "BatchPrefillWithPagedKVCacheWrapper": (
        "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf "
        "paged_kv_indices_buf paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend "
        "jit_args jit_kwargs variant_owns_mask"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        "self qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
        "num_kv_heads head_dim_qk page_size head_dim_vo custom_mask packed_custom_mask causal "
        "pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale "
        "rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr "
        "token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q "
        "block_tables max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv "
        "uniform_q_len"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "self qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo custom_mask "
        "packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction window_left "
        "logits_soft_cap sm_scale rope_scale rope_theta q_data_type kv_data_type o_data_type "
        "non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len "
        "max_item_len_ptr fixed_split_size disable_split_kv seq_lens seq_lens_q "
        "max_token_per_sequence max_sequence_kv v_indptr o_indptr uniform_q_len"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.run": (
        "self q k v args q_scale k_scale v_scale o_scale out lse return_lse lse_base lse_layout "
        "enable_pdl kv_cache_sf"
    ),
    "single_decode_with_kv_cache": (
        "q k v kv_layout pos_encoding_mode use_tensor_cores q_scale k_scale v_scale window_left "
        "logits_soft_cap sm_scale rope_scale rope_theta return_lse"
    ),
    "single_prefill_with_kv_cache": (
        "q k v scale_q scale_k scale_v o_dtype custom_mask packed_custom_mask causal kv_layout "
        "pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale "
        "rope_theta backend return_lse kv_cache_sf k_scale v_scale"
    ),
    "fast_decode_plan": (
        "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
        "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type "
        "sm_scale rope_scale rope_theta non_blocking fixed_split_size disable_split_kv "
        "q_len_per_req global_override_indptr_cpu"
    ),
}


@pytest.mark.parametrize("path", PARAMETERS)
def test_names_and_order_of_arguments(path):
    value = functools.reduce(getattr, path.split("."), precast)
    assert list(inspect.signature(value).parameters) == PARAMETERS[path].split()


@pytest.mark.parametrize(
    ("path", "defaults"),
    [
        ("BatchDecodeWithPagedKVCacheWrapper.plan", {"q_data_type": "float16", "window_left": -1}),
        ("BatchPrefillWithPagedKVCacheWrapper.plan", {"q_data_type": "float16", "causal": False}),
        ("BatchPrefillWithRaggedKVCacheWrapper.run", {"lse_base": "log2", "return_lse": False}),
        ("single_prefill_with_kv_cache", {"backend": "auto", "kv_layout": "NHD"}),
    ],
)
def test_defaults(path, defaults):
    value = functools.reduce(getattr, path.split("."), precast)
    parameters = inspect.signature(value).parameters
    assert {name: parameters[name].default for name in defaults} == defaults


def test_the_attributes_that_engines_touch(workspace):
    wrapper = planned(workspace, sm_scale=0.5, logits_soft_cap=None)
    assert wrapper._float_workspace_buffer is workspace
    assert wrapper._int_workspace_buffer.numel() == 8 * 1024 * 1024
    pinned = wrapper._pin_memory_int_workspace_buffer
    assert pinned.device.type == "cpu"
    assert pinned.shape == wrapper._int_workspace_buffer.shape
    assert wrapper._pin_memory_int_workspace_buffer is pinned
    assert torch.equal(wrapper._paged_kv_indptr_buf, TABLE[0])
    assert torch.equal(wrapper._paged_kv_indices_buf, TABLE[1])
    assert torch.equal(wrapper._paged_kv_last_page_len_buf, TABLE[2])
    assert wrapper._qo_indptr_buf.tolist() == [0, 1, 2]
    assert (wrapper._batch_size, wrapper._num_qo_heads, wrapper._num_kv_heads) == (2, 4, 2)
    assert (wrapper._sm_scale, wrapper._logits_soft_cap, wrapper._window_left) == (0.5, 0.0, -1)
    assert wrapper._cached_q_data_type is wrapper._cached_kv_data_type is torch.float32
    assert wrapper._max_kv_len == 11
    assert all(isinstance(number, int) for number in wrapper._plan_info)
    assert wrapper._block_tables is wrapper._sinks is None
    assert wrapper.resolved_backend == "fa2"
    prefill = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    prefill.plan(torch.tensor([0, 3, 4]), *TABLE, 4, 2, 64, 8, q_data_type="float32")
    assert prefill._qo_indptr_last == 4
    assert (prefill._max_q_len, prefill._max_kv_len) == (3, 11)
    assert prefill._custom_mask_buf is prefill._mask_indptr_buf is None
    assert prefill._max_total_num_rows is None


def test_dtypes_may_be_strings_and_have_defaults(workspace):
    wrapper = planned(workspace, q_data_type="bfloat16", kv_data_type="float8_e4m3fn")
    assert wrapper._cached_q_data_type is wrapper._cached_o_data_type is torch.bfloat16
    assert wrapper._cached_kv_data_type is torch.float8_e4m3fn
    wrapper.plan(*TABLE, 4, 2, 64, 8)
    assert wrapper._cached_kv_data_type is torch.float16
    wrapper.plan(*TABLE, 4, 2, 64, 8, q_data_type=None, data_type="bfloat16")
    assert wrapper._cached_q_data_type is wrapper._cached_kv_data_type is torch.bfloat16


def test_options_of_plan_by_position_are_deprecated(workspace):
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace)
    with pytest.warns(DeprecationWarning, match="positionally is deprecated"):
        wrapper.plan(*TABLE, 4, 2, 64, 8, "ALIBI", 5, None, "float32", sm_scale=0.25)
    assert (wrapper._pos_encoding_mode, wrapper._window_left) == ("ALIBI", 5)
    assert (wrapper._cached_q_data_type, wrapper._sm_scale) == (torch.float32, 0.25)
    with pytest.raises(TypeError, match="multiple values for argument 'window_left'"):
        wrapper.plan(*TABLE, 4, 2, 64, 8, "NONE", 5, window_left=6)
    with pytest.raises(TypeError, match=r"accepts at most 16 .* got 17"):
        wrapper.plan(*TABLE, 4, 2, 64, 8, *range(17))


def test_outputs_may_be_given(workspace):
    wrapper = planned(workspace)
    q, cache = decode_call()
    want, sums = wrapper.run_return_lse(q, cache)
    out, lse = torch.empty_like(q), torch.empty(2, 4)
    got = wrapper.run(q, cache, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert torch.equal(out, want)
    assert torch.equal(lse, sums)


def test_an_output_of_another_dtype(workspace):
    wrapper = planned(workspace, q_data_type="bfloat16", o_data_type="float32")
    q, cache = decode_call(torch.bfloat16)
    out = wrapper.run(q, cache)
    assert out.dtype is torch.float32
    q, k = torch.randn(3, 4, 64).half(), torch.randn(5, 2, 64).half()
    out = precast.single_prefill_with_kv_cache(q, k, k, o_dtype=torch.float32)
    assert out.dtype is torch.float32


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_scales(workspace, kind):
    wrapper = planned(workspace)
    q, cache = decode_call()
    got = wrapper.run_return_lse(q, cache, q_scale=kind(2.0), k_scale=kind(0.5), v_scale=kind(3.0))
    want = wrapper.run_return_lse(q, cache)
    torch.testing.assert_close(got[0], 3 * want[0])
    torch.testing.assert_close(got[1], want[1])


def test_the_log_sum_exp_in_another_base_and_layout(workspace):
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    wrapper.plan(torch.tensor([0, 3, 4]), *TABLE, 4, 2, 64, 8, causal=True, q_data_type="float32")
    q, cache = torch.randn(4, 4, 64), decode_call()[1]
    _, lse = wrapper.run_return_lse(q, cache)
    buffer = torch.empty(4, 4)
    _, returned = wrapper.run_return_lse(q, cache, lse_layout="HN", lse=buffer)
    assert returned is buffer
    assert torch.equal(returned, lse.t())
    _, natural = wrapper.run_return_lse(q, cache, lse_base="ln")
    torch.testing.assert_close(natural.exp(), torch.exp2(lse))


def test_a_plan_serves_many_runs_and_is_replaced(workspace):
    wrapper = planned(workspace)
    for heads, q_len in ((4, 1), (8, 2), (4, 1)):
        wrapper.plan(*TABLE, heads, 2, 64, 8, q_data_type="float32", q_len_per_req=q_len)
        for _ in range(2):
            q, cache = torch.randn(2 * q_len, heads, 64), decode_call()[1]
            out, lse = wrapper.run_return_lse(q, cache)
            want = wrapper.reference(q, cache, *TABLE, q_len_per_req=q_len)
            torch.testing.assert_close(out, want[0])
            torch.testing.assert_close(lse, want[1])


def test_forward_takes_options_of_its_own(workspace):
    wrapper = planned(workspace)
    q, cache = decode_call()
    got = wrapper.forward(q, cache, window_left=2, sm_scale=0.3, logits_soft_cap=5.0)
    want, lse = wrapper.reference(q, cache, *TABLE, "NHD", "NONE", 2, 5.0, 0.3)
    torch.testing.assert_close(got, want)
    got = wrapper.forward_return_lse(q, cache, window_left=2, sm_scale=0.3, logits_soft_cap=5.0)
    torch.testing.assert_close(got[1], lse)
    wrapper.end_forward()
    assert type(wrapper).begin_forward is type(wrapper).plan
    prefill = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    prefill.begin_forward(torch.tensor([0, 3]), torch.tensor([0, 5]), 4, 2, 64, q_data_type=q.dtype)
    q, k = torch.randn(3, 4, 64), torch.randn(5, 2, 64)
    want = single_prefill_with_kv_cache_reference(q, k, k, causal=True, return_lse=True)
    got = prefill.forward_return_lse(q, k, k, causal=True)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_sinks_of_the_wrapper_count_where_run_has_none(workspace):
    prefill = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    lengths = torch.tensor([0, 3]), torch.tensor([0, 5])
    prefill.plan(*lengths, 4, 2, 64, q_data_type="float32")
    q, k = torch.randn(3, 4, 64), torch.randn(5, 2, 64)
    prefill._sinks = torch.randn(4)
    want, _ = prefill.reference(q, k, k, *lengths, sinks=prefill._sinks)
    torch.testing.assert_close(prefill.run(q, k, k), want)


def test_what_is_packed_by_hand_is_what_plan_packs(workspace):
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    rows = torch.tensor([0, 3, 5])
    mask = torch.rand(3 * 11 + 2 * 8) < 0.5
    q, cache = torch.randn(5, 4, 64), decode_call()[1]
    wrapper.plan(rows, *TABLE, 4, 2, 64, 8, custom_mask=mask, q_data_type="float32")
    out = wrapper.run(q, cache)
    assert wrapper._mask_indptr_buf.tolist() == [0, 5, 7]
    packed = wrapper._custom_mask_buf.clone()
    wrapper.plan(rows, *TABLE, 4, 2, 64, 8, packed_custom_mask=packed, q_data_type="float32")
    assert wrapper._mask_indptr_buf.tolist() == [0, 5, 7]
    assert torch.equal(wrapper.run(q, cache), out)
    wrapper.plan(rows, *TABLE, 4, 2, 64, 8, q_data_type="float32")
    assert wrapper._custom_mask_buf is None
    assert not torch.equal(wrapper.run(q, cache), out)


# -- CUDA graphs ----------------------------------------------------------------------------------


def buffers():
    return {
        "paged_kv_indptr_buffer": torch.zeros(3, dtype=I32),
        "paged_kv_indices_buffer": torch.zeros(9, dtype=I32),
        "paged_kv_last_page_len_buffer": torch.zeros(2, dtype=I32),
    }


def test_plans_for_graphs_copy_into_buffers(workspace):
    given = buffers()
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace, use_cuda_graph=True, **given)
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(*TABLE, 4, 2, 64, 8, q_data_type="float32")
    assert wrapper._paged_kv_indices_buf is given["paged_kv_indices_buffer"]
    assert given["paged_kv_indptr_buffer"].tolist() == TABLE[0].tolist()
    assert given["paged_kv_indices_buffer"].tolist() == [*TABLE[1].tolist(), 0, 0, 0, 0, 0]
    assert given["paged_kv_last_page_len_buffer"].tolist() == TABLE[2].tolist()
    q, cache = decode_call()
    torch.testing.assert_close(wrapper.run(q, cache), wrapper.reference(q, cache, *TABLE)[0])


def test_the_wrapper_for_graphs_takes_buffers_by_position(workspace):
    wrapper = precast.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers().values())
    assert wrapper.is_cuda_graph_enabled
    wrapper.plan(*TABLE, 4, 2, 64, 8, q_data_type="float32")
    q, cache = decode_call()
    torch.testing.assert_close(wrapper.run(q, cache), wrapper.reference(q, cache, *TABLE)[0])


def test_a_fast_plan_reads_the_buffers(workspace):
    given = buffers()
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace, use_cuda_graph=True, **given)
    wrapper.plan(*TABLE, 4, 2, 64, 8, q_data_type="float32")
    wrapper.begin_forward = functools.partial(precast.fast_decode_plan, wrapper)
    assert wrapper.begin_forward.func == precast.fast_decode_plan
    new = (
        torch.tensor([0, 1, 3], dtype=I32),
        torch.tensor([2, 6, 5], dtype=I32),
        torch.tensor([8, 1], dtype=I32),
    )
    for buffer, values in zip(given.values(), new):
        buffer[: len(values)] = values
    wrapper.begin_forward(
        torch.zeros(3, dtype=I32),
        torch.zeros(3, dtype=I32),
        torch.zeros(2, dtype=I32),
        4,
        2,
        64,
        8,
        q_data_type="float32",
        non_blocking=True,
        global_override_indptr_cpu=new[0],
    )
    q, cache = decode_call()
    torch.testing.assert_close(wrapper.run(q, cache), wrapper.reference(q, cache, *new)[0])
    assert torch.equal(given["paged_kv_indptr_buffer"], new[0])


def test_a_fast_plan_without_graphs_keeps_what_it_is_given(workspace):
    wrapper = planned(workspace)
    new = tuple(values.clone() for values in TABLE)
    precast.fast_decode_plan(wrapper, *new, 4, 2, 64, 8, q_data_type="float32")
    assert wrapper._paged_kv_indptr_buf is new[0]
    assert wrapper._paged_kv_indices_buf is new[1]


def test_plans_past_plan(workspace, monkeypatch):
    """What engines call with positional arguments of their own."""
    wrapper = planned(workspace)
    seen = []
    pack = kernels.pack_plan.reference

    def packed(*args):
        pack(*args)
        seen.append((args, read_block(args[-1])[0]))

    monkeypatch.setattr(kernels.pack_plan, "reference", packed)
    places = (workspace, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer)
    empty = torch.empty(0)
    info = wrapper._cached_module.plan(
        *places, TABLE[0], 2, 4, 2, 8, False, -1, 0.0, 64, 64, empty, empty
    )
    assert info == wrapper._plan_info
    rows, lens = torch.tensor([0, 3, 4]), torch.tensor([11, 8])
    prefill = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    prefill.plan(rows, *TABLE, 4, 2, 64, 8, causal=True, q_data_type="float32")
    args = (*places, rows, TABLE[0], lens, 4, 2, 4, 2, 8, False, 64, 64, True, -1)
    assert prefill._cached_module.plan(*args, -1, False, 0, 0) == prefill._plan_info
    assert prefill._cached_module.plan(*args) == prefill._plan_info
    assert len(seen) == 4
    assert seen[0][1][:7] == (2, 2, 1, 8, 4, 2, 64)
    arguments, shape = seen[2]
    assert shape[:4] == (2, -1, 0, 8)
    assert shape.causal
    named = dict(zip(kernels.pack_plan.parameters, arguments))
    assert named["kv_len"].tolist() == [11, 8]
    assert named["kv_last_page_len"] is None
    with pytest.raises(TypeError, match="takes 15, 16, 18, 19, 20 arguments, got 3"):
        wrapper._cached_module.plan(*places)


def test_attributes_that_engines_set_count_from_the_next_run(workspace):
    wrapper = planned(workspace)
    q, cache = decode_call()
    wrapper.run(q, cache)
    before = wrapper._plan
    wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap = None, -1, 0.0
    assert wrapper._plan is before, "nothing has changed"
    indices = torch.tensor([3, 2, 6], dtype=I32)
    wrapper._sm_scale, wrapper._window_left, wrapper._paged_kv_indices_buf = 0.3, 2, indices
    wrapper._pos_encoding_mode = "ALIBI"
    assert before.scores.sm_scale is None, "a plan is frozen"
    want, _ = wrapper.reference(
        q, cache, TABLE[0], indices, TABLE[2], "NHD", "ALIBI", 2, sm_scale=0.3
    )
    torch.testing.assert_close(wrapper.run(q, cache), want)
    wrapper._pos_encoding_mode = "X"
    with pytest.raises(KeyError, match="pos_encoding_mode must be NONE, ROPE_LLAMA, ALIBI"):
        wrapper.run(q, cache)
    wrapper._plan_info = None
    with pytest.raises(ValueError, match="there is no plan"):
        wrapper.run(q, cache)


#: What engines read, and some of them set.
ATTRIBUTES = [
    "_float_workspace_buffer",
    "_int_workspace_buffer",
    "_pin_memory_int_workspace_buffer",
    "_cached_module",
    "_plan_info",
    "_backend",
    "_qo_indptr_buf",
    "_qo_indptr_last",
    "_paged_kv_indptr_buf",
    "_paged_kv_indices_buf",
    "_paged_kv_last_page_len_buf",
    "_custom_mask_buf",
    "_mask_indptr_buf",
    "_max_q_len",
    "_max_kv_len",
    "_max_total_num_rows",
    "_batch_size",
    "_num_qo_heads",
    "_num_kv_heads",
    "_cached_q_data_type",
    "_cached_kv_data_type",
    "_cached_o_data_type",
    "_block_tables",
    "_prefix_len_ptr",
    "_token_pos_in_items_ptr",
    "_token_pos_in_items_len",
    "_max_item_len_ptr",
    "_window_left",
    "_logits_soft_cap",
    "_sm_scale",
    "_causal",
    "_rope_scale",
    "_rope_theta",
    "_pos_encoding_mode",
    "_jit_module",
    "_use_cuda_graph",
    "_kv_layout",
    "is_cuda_graph_enabled",
    "device",
    "begin_forward",
]


def test_every_attribute_that_engines_know_is_there(workspace):
    """Before a plan, too; those of docs and of the engines' own planning."""
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    assert [name for name in ATTRIBUTES if not hasattr(wrapper, name)] == []
    assert wrapper._cached_module is wrapper._plan_info is None
    wrapper.vllm_first_call = True  # Engines add their own.


def test_warnings_are_for_what_is_deprecated_alone(workspace):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapper = planned(workspace)
        wrapper.run(*decode_call())
    with pytest.warns(DeprecationWarning, match="pass it to plan"):
        wrapper.run(*decode_call(), q_len_per_req=1)


def test_requirements():
    prefill = precast.single_prefill_with_kv_cache
    assert prefill.has_backend("fa2")
    assert prefill.has_backend("fa3")
    assert prefill.has_backend_choices()
    assert not precast.single_decode_with_kv_cache.has_backend_choices()
    q, k = torch.randn(3, 4, 64), torch.randn(5, 2, 64)
    out, lse = precast.single_prefill_with_kv_cache_return_lse(q, k, k)
    assert (out.shape, lse.shape) == ((3, 4, 64), (3, 4))
    assert list(prefill.suitable_auto_backends) == ["fa2"]


def test_an_empty_batch(workspace):
    none = torch.zeros(0, dtype=I32)
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace)
    wrapper.plan(none.new_zeros(1), none, none, 4, 2, 64, 8, q_data_type="float32")
    out, lse = wrapper.run_return_lse(torch.randn(0, 4, 64), torch.randn(1, 2, 8, 2, 64))
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))
    prefill = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    prefill.plan(
        none.new_zeros(1), none.new_zeros(1), none, none, 4, 2, 64, 8, q_data_type="float32"
    )
    assert prefill.run(torch.randn(0, 4, 64), torch.randn(1, 2, 8, 2, 64)).shape == (0, 4, 64)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("packed", [False, True])
def test_page_size_1_may_be_left_out_of_the_shape(workspace, kv_layout, packed):
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout)
    table = torch.tensor([0, 3, 4]), torch.tensor([2, 0, 5, 1]), torch.tensor([1, 1])
    wrapper.plan(*table, 4, 2, 64, 1, q_data_type="float32")
    q, cache = torch.randn(2, 4, 64), torch.randn(6, 2, 2, 64)
    whole = cache.unsqueeze(-2 if kv_layout == "HND" else -3)
    given = cache if packed else (cache[:, 0], cache[:, 1])
    torch.testing.assert_close(wrapper.run(q, given), wrapper.run(q, whole))


def test_what_engines_take_from_utils():
    from precast import utils

    assert utils.canonicalize_torch_dtype("float16") is torch.float16
    assert utils._ceil_pow2(5) == 8
    row = utils._get_range_buf(5, "cpu")
    assert row.tolist() == [0, 1, 2, 3, 4]
    assert utils._cache_buf["range_8", "cpu"] is not None  # The key holds what was passed.
    assert utils._get_range_buf(8, "cpu").data_ptr() == row.data_ptr()
    assert utils.PosEncodingMode["ALIBI"].value == 2
    assert utils.MaskMode.CUSTOM.value == 2
    assert utils.TensorLayout.HND.value == 1
    assert utils.get_alibi_slopes(2).tolist() == [2**-4, 2**-8]
