# SPDX-License-Identifier: Apache-2.0
"""Names that only engines read: what is plain Python works, and what has no kernel says so."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import precast
from precast.errors import BackendSupportedError
from precast.shim import look_up
from precast.shim.facade import ENGINE_MODULES
from precast.shim.names.fused_moe import (
    _maybe_get_cached_w3_w1_permute_indices,
    convert_to_block_layout,
    get_reorder_rows_for_gated_act_gemm_row_indices,
    get_w2_permute_indices_with_cache,
)
from precast.shim.names.token_buckets import get_hybrid_num_tokens_buckets
from precast.shim.names.utils import FP4Tensor, get_trtllm_gen_multi_ctas_kv_counter_bytes
from precast.utils import get_shuffle_matrix_a_row_indices, get_shuffle_matrix_sf_a_row_indices

RAISING = [
    ("sglang", "", "mm_mxfp8", "--fp8-gemm-backend"),
    ("sglang", "fused_moe", "trtllm_mxint4_block_scale_moe", "--moe-runner-backend"),
    ("sglang", "gemm", "mm_mxfp8", "--fp8-gemm-backend"),
]


@pytest.mark.parametrize(("engine", "path", "name", "option"), RAISING)
def test_a_name_without_a_kernel_says_what_avoids_it(engine, path, name, option):
    function = look_up(path, name, engine)
    assert function.__name__ == name
    assert function.is_backend_supported("cublas", 90) is False
    with pytest.raises(BackendSupportedError, match=rf"^{name}: precast .*Fix: .*{option}"):
        function(torch.ones(1), out=None)


def test_the_documentation_lists_the_names_without_a_kernel():
    table = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith(("| vLLM |", "| SGLang |"))]
    for engine, _, name, option in RAISING:
        assert any(name in row and option in row and engine in row.lower() for row in rows), name
    assert len(rows) == len({name for _, _, name, _ in RAISING})


@pytest.mark.parametrize("engine", ENGINE_MODULES)
def test_a_name_without_a_kernel_is_there_for_one_engine_alone(engine):
    for other, path, name, _ in RAISING:
        if other != engine:
            with pytest.raises((AttributeError, KeyError)):
                look_up(path, name, engine)


def test_blocks_of_columns():
    x = torch.arange(24).view(2, 12)
    got = convert_to_block_layout(x, 4)
    assert got.shape == (3, 2, 4) and got.is_contiguous()
    assert torch.equal(got[1], x[:, 4:8])
    for wrong, block in ((x, 5), (x, 0), (x[0], 4)):
        with pytest.raises(ValueError, match=f"blockK={block}"):
            convert_to_block_layout(wrong, block)


def test_rows_of_two_halves_alternate():
    rows = get_reorder_rows_for_gated_act_gemm_row_indices(torch.empty(8, 2))
    assert rows.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    with pytest.raises(ValueError, match="even number of rows"):
        get_reorder_rows_for_gated_act_gemm_row_indices(torch.empty(7, 2))


def test_row_orders_of_expert_weights_are_kept():
    weight, scales = torch.empty(256, 4), torch.zeros(256, 4, dtype=torch.uint8)
    shuffle = get_shuffle_matrix_a_row_indices(weight, 128)
    shuffle_scales = get_shuffle_matrix_sf_a_row_indices(scales, 128, 32)
    gated = get_reorder_rows_for_gated_act_gemm_row_indices(weight)
    cache = {}
    w1 = _maybe_get_cached_w3_w1_permute_indices(cache, weight, 128)
    assert torch.equal(w1, gated[shuffle])
    plain = _maybe_get_cached_w3_w1_permute_indices(cache, weight, 128, is_gated_act_gemm=False)
    assert torch.equal(plain, shuffle)
    w1_scales = _maybe_get_cached_w3_w1_permute_indices(cache, scales, 128, 32)
    assert torch.equal(w1_scales, gated[shuffle_scales])
    w2 = get_w2_permute_indices_with_cache(cache, weight, 128)
    assert torch.equal(w2, shuffle)
    assert len(cache) == 4
    assert get_w2_permute_indices_with_cache(cache, weight + 1, 128) is w2
    assert _maybe_get_cached_w3_w1_permute_indices(cache, weight, 128) is w1
    assert get_w2_permute_indices_with_cache(cache, weight[:128], 128).shape == (128,)


@pytest.mark.parametrize(
    ("arguments", "buckets"),
    [
        ((1,), [1]),
        ((6,), [1, 2, 4, 6]),
        ((300, 100), [100, 200, 300]),
        ((256,), [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ((700, 0), [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 700]),
    ],
)
def test_buckets(arguments, buckets):
    assert get_hybrid_num_tokens_buckets(*arguments) == tuple(buckets)


def test_distances_of_large_buckets():
    got = get_hybrid_num_tokens_buckets(20000)[8:]
    assert got[:8] == tuple(range(256, 2049, 256))
    assert got[8:] == (2560, 3072, 3584, 4096, 8192, 16384, 20000)
    assert get_hybrid_num_tokens_buckets(8192)[-2:] == (4096, 8192)


def test_fp4_tensor():
    data = torch.zeros(5, 8, dtype=torch.uint8)
    scale = torch.zeros(128, 2).to(torch.float8_e4m3fn)
    tensor = FP4Tensor(data, scale, 123, (5, 15))
    assert tensor.data is data and tensor.scale is scale and tensor.dtype == "nvfp4"
    assert (tensor.scale_start_index, tensor.original_shape) == (123, (5, 15))
    for arguments, words in (
        ((data.int(), scale), "data must be uint8, got int32"),
        ((data, scale.float()), "scale must be e4m3, got float32"),
        ((data, scale[:100]), "multiple of 128 rows, got 100"),
        ((data, scale, 124), "scale_start_index=124"),
        ((data, scale, -1), "scale_start_index=-1"),
        ((data, scale, 0, (5, 14)), r"shape \[5, 7\] for original_shape \[5, 14\]"),
    ):
        with pytest.raises(ValueError, match=words):
            FP4Tensor(*arguments)


def test_bytes_of_counters():
    assert get_trtllm_gen_multi_ctas_kv_counter_bytes(4, 32, 132) == 136 * 4
    assert get_trtllm_gen_multi_ctas_kv_counter_bytes(4, 33, 132) == 136 * 4
    assert get_trtllm_gen_multi_ctas_kv_counter_bytes(1, 1, 1) == 32


# -- MLA ------------------------------------------------------------------------------------------


def test_vllms_probe_of_sparse_mla_fails():
    """vLLM would write into the plan as if it had FlashInfer's layout."""
    for path in ("", "mla"):
        theirs = look_up(path, "BatchMLAPagedAttentionWrapper", "vllm")
        parameters = inspect.signature(theirs.run).parameters
        assert "ckv_scale_arr" not in parameters
        assert parameters["options"].kind is inspect.Parameter.VAR_KEYWORD
        plain = look_up(path, "BatchMLAPagedAttentionWrapper", "sglang")
        parameter = inspect.signature(plain.run).parameters["ckv_scale_arr"]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert plain is precast.BatchMLAPagedAttentionWrapper
        assert issubclass(theirs, plain)


def test_vllms_wrapper_of_mla_takes_every_keyword(reference_mode):
    e4m3, one = torch.float8_e4m3fn, torch.tensor([0, 1], dtype=torch.int32)
    q, kv = torch.ones(1, 2, 576).bfloat16(), torch.ones(1, 4, 576).to(e4m3)
    results = []
    for engine in ("vllm", "sglang"):
        wrapper = look_up("mla", "BatchMLAPagedAttentionWrapper", engine)(torch.empty(64).byte())
        wrapper.plan(
            *(one, one, one[:1], one[1:] + 2, 2, 512, 64, 4, False, 0.1, torch.bfloat16, e4m3)
        )
        tensors = q[..., :512], q[..., 512:], kv[..., :512], kv[..., 512:]
        arr = torch.full((1, 4, 4), 0.5)
        results.append(wrapper.run(*tensors, ckv_scale_arr=arr, kpe_scale=1.0))
    assert torch.equal(*results) and results[0].unique().tolist() == [0.5]
