# SPDX-License-Identifier: Apache-2.0
"""FlashInfer: the function of the same name, called the same way."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from _tuned_moe import few, fused

PACKAGE = "flashinfer"

#: Functions that below compute capability 10.0 return uninitialised memory, or raise.
BLACKWELL_ONLY = {"fp4_quantize", "nvfp4_quantize", "mxfp4_quantize", "mxfp8_quantize"}
BLACKWELL_ONLY |= {"trtllm_batch_context_with_kv_cache"}
BLACKWELL_ONLY |= {"gated_residual_rmsnorm", "gated_residual_next_rmsnorm"}
#: Functions that wait for the GPU, or copy to the CPU, so that no CUDA graph can hold them.
NOT_IN_GRAPHS = {"segment_packbits", "mxfp4_dequantize", "e2m1_and_ufp8sf_scale_to_float"}
#: It copies from memory of the host that is not pinned, which no capture allows.
NOT_IN_GRAPHS |= {"bgmv_moe"}
#: A wrapper whose replays compute nothing: they take 4 to 9 us, however long a prefill is.
NOT_IN_GRAPHS |= {"PODWithPagedKVCacheWrapper"}
#: Routines of which this is true for all calls: their plans copy lengths to the host.
PLANS_ON_HOST = {"attention_plan"}
#: Modules of functions that neither the package nor a module of the routine's name exports.
MODULES = {
    "xqa_batch_decode_with_kv_cache": "decode",
    "trtllm_batch_context_with_kv_cache": "prefill",
    "fused_topk_deepseek": "fused_moe",
    "hash_topk": "fused_moe",
    "bgmv_moe": "fused_moe",
    "bgmv_moe_expand": "fused_moe",
    "bgmv_moe_shrink": "fused_moe",
    "mono_moe": "fused_moe",
    "fused_qk_rmsnorm_rope": "norm",
    "tinygemm_bf16": "gemm",
    "mm_M1_16_K7168_N128": "gemm",
    "mm_M1_16_K7168_N256": "gemm",
}
#: Options that select the kernel of every architecture, and the faster one for decode.
OPTIONS: dict[str, dict[str, Any]] = {
    "BatchDecodeWithPagedKVCacheWrapper": {"use_tensor_cores": True},
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": {"use_tensor_cores": True},
    "BatchPrefillWithPagedKVCacheWrapper": {"backend": "fa2"},
    "BatchPrefillWithRaggedKVCacheWrapper": {"backend": "fa2"},
    "BlockSparseAttentionWrapper": {"backend": "fa2"},
    "VariableBlockSparseAttentionWrapper": {"backend": "fa2"},
    "BatchMLAPagedAttentionWrapper": {"backend": "fa2"},
}
#: Functions that an engine does not call with our arguments alone.
CALLED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "cutlass_fused_moe": fused,
    "mono_moe": few,
}


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if case.op in NOT_IN_GRAPHS:
        return None
    if case.op in BLACKWELL_ONLY and torch.cuda.get_device_capability() < (10, 0):
        return None
    if family in PLANS_ON_HOST and case.bind is not case.whole:
        return None
    for name in ("", f".{MODULES.get(case.op, family)}"):
        place = f"{PACKAGE}{name}"
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:  # FlashInfer itself is broken.
                raise
            continue
        function = getattr(module, case.op, None)
        if callable(function):
            options = OPTIONS.get(case.op)
            called = CALLED.get(case.op, functools.partial)(function)
            return case.bind(functools.partial(called, **options) if options else called)
    return None
