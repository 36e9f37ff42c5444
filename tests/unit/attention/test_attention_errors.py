# SPDX-License-Identifier: Apache-2.0
"""What attention rejects: with the errors that engines expect, and texts that say why."""

from __future__ import annotations

import pytest
import torch

import precast
from precast._ops.attention.validation import HEAD_DIMS
from precast.errors import (
    BackendSupportedError,
    CacheLayoutError,
    PlanMismatchError,
    UnsupportedConfigError,
)

I32 = torch.int32
TABLE = (
    torch.tensor([0, 2, 3], dtype=I32),
    torch.tensor([4, 1, 0], dtype=I32),
    torch.tensor([3, 8], dtype=I32),
)
ROWS = torch.tensor([0, 3, 4], dtype=I32)
F32 = {"q_data_type": "float32"}
WRAPPERS = (
    precast.BatchDecodeWithPagedKVCacheWrapper,
    precast.BatchPrefillWithPagedKVCacheWrapper,
    precast.BatchPrefillWithRaggedKVCacheWrapper,
)
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda w: w.__name__)

pytestmark = pytest.mark.usefixtures("reference_mode")


def workspace():
    return torch.empty(1024, dtype=torch.uint8)


def decode(**options):
    return precast.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), **{"use_tensor_cores": True, **options}
    )


def graph_buffers(batch=2):
    return {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": torch.zeros(batch + 1, dtype=I32),
        "paged_kv_indices_buffer": torch.zeros(3, dtype=I32),
        "paged_kv_last_page_len_buffer": torch.zeros(batch, dtype=I32),
    }


# -- wrappers -------------------------------------------------------------------------------------


@wrappers
@pytest.mark.parametrize("backend", ["cudnn", "trtllm-gen", "cutlass", "cute-dsl", "fa9"])
def test_backends(wrapper, backend):
    with pytest.raises(BackendSupportedError, match=f"backend='{backend}'.*pass backend='auto'"):
        wrapper(workspace(), backend=backend)


@wrappers
@pytest.mark.parametrize("error", [KeyError, ValueError, CacheLayoutError])
def test_layouts(wrapper, error):
    with pytest.raises(error, match="kv_layout must be NHD or HND, got 'DHN'"):
        wrapper(workspace(), "DHN")


@wrappers
def test_workspaces_are_aligned(wrapper):
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        wrapper(workspace()[1:])
    made = wrapper(workspace())
    for given in ((workspace()[3:], workspace()), (workspace(), workspace()[8:])):
        with pytest.raises(ValueError, match="workspace_buffer must be 16-byte aligned"):
            made.reset_workspace_buffer(*given)
    ints = workspace()
    made.reset_workspace_buffer(workspace(), ints)
    assert made._int_workspace_buffer is ints


def test_a_workspace_takes_its_plan_along():
    wrapper = planned()
    wrapper.run(*call())
    wrapper.reset_workspace_buffer(workspace(), workspace())
    with pytest.raises(PlanMismatchError, match=r"there is no plan. Fix: call plan"):
        wrapper.run(*call())
    wrapper.plan(*TABLE, 4, 2, 64, 8, **F32)
    wrapper.run(*call())


@pytest.mark.parametrize("missing", [*graph_buffers()][1:])
def test_graphs_need_buffers(missing):
    with pytest.raises(ValueError, match=f"{missing} should be a torch.Tensor in cudagraph mode"):
        decode(**{**graph_buffers(), missing: None})


def test_buffers_of_one_batch():
    given = {**graph_buffers(), "paged_kv_indptr_buffer": torch.zeros(7, dtype=I32)}
    with pytest.raises(ValueError, match="The size of paged_kv_indptr_buffer should be batch_size"):
        decode(**given)
    paged = precast.BatchPrefillWithPagedKVCacheWrapper
    with pytest.raises(ValueError, match=r"qo_indptr_buf should be a torch.Tensor in CUDA graph"):
        paged(workspace(), use_cuda_graph=True)
    three, two = torch.zeros(3, dtype=I32), torch.zeros(2, dtype=I32)
    with pytest.raises(ValueError, match="The length of paged_kv_last_page_len_buf should be"):
        paged(workspace(), "NHD", True, three, three, two, three)
    with pytest.raises(ValueError, match=r"kv_indptr_buf \(2\) should be the same as qo_indptr"):
        precast.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, three, two)


# -- plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [32, 72, 100, 127, 192, 576])
def test_head_dims(head_dim):
    legal = ", ".join(f"{qk}" if qk == vo else f"{qk}/{vo}" for qk, vo in HEAD_DIMS)
    words = rf"one of {legal}, got {head_dim}/{head_dim}"
    with pytest.raises(UnsupportedConfigError, match=words):
        decode().plan(*TABLE, 4, 2, head_dim, 8)
    with pytest.raises(ValueError, match=words):
        precast.BatchPrefillWithRaggedKVCacheWrapper(workspace()).plan(ROWS, ROWS, 4, 2, head_dim)
    x = torch.zeros(2, 2, head_dim)
    with pytest.raises(ValueError, match=words):
        precast.single_prefill_with_kv_cache(x, x, x)
    with pytest.raises(ValueError, match=words):
        precast.single_decode_with_kv_cache(x[0], x, x)


def test_head_dims_of_two_kinds():
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(ROWS, ROWS, 4, 2, 192, 128, **F32)
    with pytest.raises(ValueError, match="got 128/64"):
        wrapper.plan(ROWS, ROWS, 4, 2, 128, 64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"q_data_type": "float8_e4m3fn"}, "o_data_type must be float16, bfloat16 or float32"),
        ({"q_data_type": "uint8", "o_data_type": "float16"}, "q_data_type must be float16 or"),
        ({"kv_data_type": "int8"}, "kv_data_type must be float16 as q_data_type, float8_e4m3fn"),
        ({"kv_data_type": "bfloat16"}, "kv_data_type must be float16 as q_data_type"),
        ({"o_data_type": "float8_e4m3fn"}, "o_data_type must be float16, bfloat16 or float32"),
        ({"q_data_type": "half_float"}, "must be the name of a torch dtype, got 'half_float'"),
    ],
)
def test_dtypes(options, words):
    with pytest.raises(ValueError, match=words):
        decode().plan(*TABLE, 4, 2, 64, 8, **options)
    with pytest.raises(TypeError, match=r"q_data_type must be a string or torch.dtype, got int"):
        decode().plan(*TABLE, 4, 2, 64, 8, q_data_type=16)


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 2), (2, 4), (4, 0), (0, 1)])
def test_heads(heads, kv_heads):
    with pytest.raises(ValueError, match="must be a positive multiple of num_kv_heads"):
        decode().plan(*TABLE, heads, kv_heads, 64, 8)


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_positions(error):
    with pytest.raises(error, match="pos_encoding_mode must be NONE, ROPE_LLAMA, ALIBI, got 'X'"):
        decode().plan(*TABLE, 4, 2, 64, 8, pos_encoding_mode="X")
    x = torch.zeros(2, 2, 64)
    with pytest.raises(error, match="pos_encoding_mode must be NONE, ROPE_LLAMA, ALIBI, got 'X'"):
        precast.single_prefill_with_kv_cache(x, x, x, pos_encoding_mode="X")


def test_what_asks_for_tensor_cores():
    wrapper = decode(use_tensor_cores=False)
    with pytest.raises(ValueError, match="q_len_per_req > 1 requires tensor-core decode"):
        wrapper.plan(*TABLE, 4, 2, 64, 8, q_len_per_req=2)
    with pytest.raises(ValueError, match="fixed_split_size is only supported by tensor core"):
        wrapper.plan(*TABLE, 4, 2, 64, 8, fixed_split_size=4)
    with pytest.raises(ValueError, match="q_len_per_req must be >= 1, got 0"):
        wrapper.plan(*TABLE, 4, 2, 64, 8, q_len_per_req=0)


def test_options_with_one_value():
    with pytest.raises(NotImplementedError, match="window_right must be 0, got 1"):
        decode().plan(*TABLE, 4, 2, 64, 8, window_right=1)
    with pytest.raises(NotImplementedError, match="is_causal must be None or True"):
        decode().plan(*TABLE, 4, 2, 64, 8, q_len_per_req=2, is_causal=False)
    ragged = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    with pytest.raises(NotImplementedError, match="v_indptr must be None"):
        ragged.plan(ROWS, ROWS, 4, 2, 64, v_indptr=ROWS)


def test_queries_are_among_the_tokens():
    with pytest.raises(ValueError, match=r"request with kv_len=8: .* an empty KV range"):
        decode().plan(*TABLE, 4, 2, 64, 8, q_len_per_req=9)


def test_what_graphs_hold_fast():
    wrapper = decode(**graph_buffers())
    wrapper.plan(*TABLE, 4, 2, 64, 8, **F32)
    with pytest.raises(ValueError, match="q_len_per_req is part of the frozen cudagraph shape"):
        wrapper.plan(*TABLE, 4, 2, 64, 8, q_len_per_req=2, **F32)
    with pytest.raises(ValueError, match="frozen"):
        precast.fast_decode_plan(wrapper, *TABLE, 4, 2, 64, 8, q_len_per_req=2)
    with pytest.raises(ValueError, match="batch size should be fixed in cudagraph mode"):
        wrapper.plan(TABLE[0][:2], TABLE[1], TABLE[2][:1], 4, 2, 64, 8, **F32)
    more = torch.zeros(9, dtype=I32)
    with pytest.raises(ValueError, match="size of indices, 9, should be less than or equal"):
        wrapper.plan(TABLE[0], more, TABLE[2], 4, 2, 64, 8, **F32)
    # The plan before is still there.
    q, cache = torch.randn(2, 4, 64), torch.randn(8, 2, 8, 2, 64)
    torch.testing.assert_close(wrapper.run(q, cache), wrapper.reference(q, cache, *TABLE)[0])


def test_what_graphs_hold_fast_of_a_prefill():
    buffers = (torch.zeros(3, dtype=I32), torch.zeros(3, dtype=I32))
    ragged = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    ragged.plan(ROWS, ROWS, 4, 2, 64, **F32)
    assert ragged._max_total_num_rows == 4
    with pytest.raises(ValueError, match="total number of rows in qo_indptr 9 in cuda graph mode"):
        ragged.plan(torch.tensor([0, 3, 9]), ROWS, 4, 2, 64, **F32)
    with pytest.raises(ValueError, match="The batch size should be fixed during the lifecycle"):
        ragged.plan(ROWS[:2], ROWS[:2], 4, 2, 64, **F32)
    with pytest.raises(ValueError, match="custom_mask_buf must be initialized with a"):
        ragged.plan(ROWS, ROWS, 4, 2, 64, custom_mask=torch.ones(10).bool(), **F32)
    paged = precast.BatchPrefillWithPagedKVCacheWrapper(
        workspace(), "NHD", True, *buffers, torch.zeros(2, dtype=I32), torch.zeros(2, dtype=I32)
    )
    with pytest.raises(ValueError, match="length of paged_kv_indices exceeds the allocated buffer"):
        paged.plan(ROWS, *TABLE, 4, 2, 64, 8, **F32)


def test_lengths_of_indptrs():
    ragged = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    with pytest.raises(ValueError, match="kv_indptr must have length 3 as qo_indptr, got 2"):
        ragged.plan(ROWS, ROWS[:2], 4, 2, 64)


def test_items_need_places():
    ragged = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    with pytest.raises(ValueError, match=r"token_pos_in_items_ptr must be a torch.Tensor where"):
        ragged.plan(ROWS, ROWS, 4, 2, 64, prefix_len_ptr=torch.tensor([1, 1]), **F32)


# -- run ------------------------------------------------------------------------------------------


def planned(**options):
    wrapper = decode()
    wrapper.plan(*TABLE, 4, 2, 64, 8, **{**F32, **options})
    return wrapper


def call():
    return torch.randn(2, 4, 64), torch.randn(8, 2, 8, 2, 64)


def test_a_run_needs_a_plan():
    for wrapper, args in (
        (decode(), call()),
        (precast.BatchPrefillWithPagedKVCacheWrapper(workspace()), call()),
        (precast.BatchPrefillWithRaggedKVCacheWrapper(workspace()), torch.randn(3, 2, 4, 64)),
    ):
        with pytest.raises(PlanMismatchError, match=r"there is no plan. Fix: call plan"):
            wrapper.run(*args)


def test_dtypes_are_those_of_the_plan():
    q, cache = call()
    with pytest.raises(ValueError, match=r"dtype of q, torch.float16, does not match the q_data"):
        planned().run(q.half(), cache)
    with pytest.raises(ValueError, match=r"dtype of paged_kv_cache, torch.float16, does not"):
        planned().run(q, cache.half())


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (4, r"q implies q_len_per_req=2 but the prior plan\(\) used 1"),
        (3, r"q.shape\[0\] \(3\) does not match batch_size \* q_len_per_req of the prior plan"),
        (0, r"q.shape\[0\] \(0\) does not match"),
    ],
)
def test_as_many_queries_as_planned(tokens, words):
    with pytest.raises(ValueError, match=words):
        planned().run(torch.randn(tokens, 4, 64), call()[1])
    prefill = precast.BatchPrefillWithPagedKVCacheWrapper(workspace())
    prefill.plan(torch.tensor([0, 1, 2]), *TABLE, 4, 2, 64, 8, **F32)
    with pytest.raises(ValueError, match=rf"\({tokens}\) does not match qo_indptr\[-1\] \(2\)"):
        prefill.run(torch.randn(tokens, 4, 64), call()[1])


def test_without_tensor_cores_there_is_one_query():
    wrapper = decode(use_tensor_cores=False)
    wrapper.plan(*TABLE, 4, 2, 64, 8, **F32)
    with pytest.raises(ValueError, match="without use_tensor_cores only q_len_per_req=1"):
        wrapper.run(torch.randn(4, 4, 64), call()[1])


@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_windows_are_those_of_the_plan(error):
    wrapper = planned(window_left=4)
    wrapper.run(*call(), window_left=4)
    with pytest.raises(error, match="window_left must be 4 as in plan"):
        wrapper.run(*call(), window_left=-1)


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_caches(error):
    q, cache = call()
    for wrong, words in (
        ([cache[:, 0], cache[:, 1]], "must be a torch.Tensor or a tuple of two, got list"),
        ((cache[:, 0],), "must be a torch.Tensor or a tuple of two, got a tuple of 1"),
        ((cache[:, 0], None), "must be a torch.Tensor or a tuple of two, got NoneType"),
    ):
        with pytest.raises(error, match=words):
            planned().run(q, wrong)
    with pytest.raises(TypeError, match=r"q must be a torch.Tensor, got NoneType"):
        planned().run(None, cache)


def test_shapes_of_caches():
    q, cache = call()
    with pytest.raises(ValueError, match=r"paged_kv_cache must have shape \[8, 2, 8, 2, 64\]"):
        planned().run(q, cache[:, :1])
    with pytest.raises(
        ValueError, match=r"must have shape \[8, 2, 8, 2, 64\], got \[8, 2, 8, 2, 32"
    ):
        planned().run(q, cache[..., :32])
    for shape in ((8, 2, 8, 3, 64), (8, 2, 16, 2, 64), (8, 2, 2, 8, 64)):
        with pytest.raises(ValueError, match="must have 2 heads and pages of 8 tokens as in plan"):
            planned().run(q, torch.randn(shape))
    with pytest.raises(ValueError, match=r"q must have 4 heads as in plan\(\), got shape"):
        planned().run(torch.randn(2, 2, 64), cache)
    for wrong_q, wrong_cache in ((q[:, 0, 0], cache), (q, cache[0, 0, 0])):
        with pytest.raises(ValueError, match="must have at least 3 dimensions, got shape"):
            planned().run(wrong_q, wrong_cache)


def test_heads_of_a_ragged_run():
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(ROWS, ROWS * 2, 4, 2, 64, **F32)
    q, k = torch.randn(4, 4, 64), torch.randn(8, 2, 64)
    with pytest.raises(ValueError, match="k must have 2 heads as in plan"):
        wrapper.run(q, k.repeat(1, 2, 1), k.repeat(1, 2, 1))
    with pytest.raises(ValueError, match="q must have 4 heads as in plan"):
        wrapper.run(q[:, :2], k, k)
    with pytest.raises(ValueError, match="q must have at least 3 dimensions"):
        wrapper.run(q[:, 0, 0], k, k)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out": torch.empty(2, 4, 32)}, "Invalid shape of out: expected"),
        ({"out": torch.empty(2, 4, 64).half()}, "Invalid dtype of out: expected torch.float32"),
        ({"lse": torch.empty(2, 5)}, "Invalid shape of lse: expected"),
        ({"lse": torch.empty(2, 4).half()}, "Invalid dtype of lse: expected torch.float32"),
        ({"k_scale": torch.ones(4)}, "k_scale must be one number, got a tensor of shape"),
        ({"sinks": torch.zeros(3)}, "sinks must have shape"),
        ({"sinks": torch.zeros(4).half()}, "sinks must be float32"),
    ],
)
def test_tensors_of_a_run(options, words):
    with pytest.raises(ValueError, match=words):
        planned().run(*call(), return_lse=True, **options)


def test_other_backends_options():
    with pytest.raises(NotImplementedError, match="kv_cache_sf must be None"):
        planned().run(*call(), kv_cache_sf=torch.ones(1))
    with pytest.raises(NotImplementedError, match="skip_softmax_threshold_scale_factor must be"):
        planned().run(*call(), skip_softmax_threshold_scale_factor=1.0)
    with pytest.raises(TypeError, match="no further arguments by position, got 1"):
        planned().run(*call(), torch.ones(1))
    ragged = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(ROWS, ROWS, 4, 2, 64, **F32)
    q, k = torch.randn(4, 4, 64), torch.randn(4, 2, 64)
    with pytest.raises(NotImplementedError, match=r"o_scale must be None, got 2.0"):
        ragged.run(q, k, k, o_scale=2.0)
    ragged.run(q, k, k, o_scale=1.0)
    with pytest.raises(ValueError, match="lse_base must be 'log2' or 'ln', got 'e'"):
        ragged.run(q, k, k, return_lse=True, lse_base="e")
    with pytest.raises(ValueError, match="lse_layout must be 'NH' or 'HN', got 'NN'"):
        ragged.run(q, k, k, return_lse=True, lse_layout="NN")


# -- one request ----------------------------------------------------------------------------------


def test_one_request():
    q, k = torch.randn(3, 4, 64), torch.randn(5, 2, 64)
    prefill = precast.single_prefill_with_kv_cache
    with pytest.raises(BackendSupportedError, match="cudnn"):
        prefill(q, k, k, backend="cudnn")
    with pytest.raises(ValueError, match=r"scale_q must be None for queries of torch\.float32"):
        prefill(q, k, k, scale_q=torch.ones(4))
    with pytest.raises(KeyError, match="kv_layout must be NHD or HND"):
        prefill(q, k, k, kv_layout="X")
    with pytest.raises(TypeError, match=r"v must be a torch.Tensor, got NoneType"):
        prefill(q, k, None)
    with pytest.raises(ValueError, match="num_qo_heads must be a positive multiple"):
        prefill(q[:, :3], k, k)


def test_without_reference_mode_the_host_has_no_kernels():
    q, k = torch.randn(3, 4, 64).half(), torch.randn(5, 2, 64).half()
    wrapper = decode()
    from precast._op import mode as _mode

    _mode._shift(-1)
    try:
        words = "must be a CUDA tensor"
        with pytest.raises(ValueError, match=words):
            precast.single_decode_with_kv_cache(q[0], k, k)
        with pytest.raises(ValueError, match=words):
            precast.single_prefill_with_kv_cache(q, k, k)
        with pytest.raises(ValueError, match=words):
            wrapper.plan(*TABLE, 4, 2, 64, 8)
    finally:
        _mode._shift(+1)
