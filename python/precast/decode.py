# SPDX-License-Identifier: Apache-2.0
"""Decode attention: the newest token of each request over its KV cache."""

from __future__ import annotations

from precast._ops.attention.batch_reference import batch_decode_with_paged_kv_cache_reference
from precast._ops.attention.decode.graphs import (
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from precast._ops.attention.decode.single import (
    single_decode_with_kv_cache,
    single_decode_with_kv_cache_reference,
)
from precast._ops.attention.decode.wrapper import BatchDecodeWithPagedKVCacheWrapper
from precast._ops.attention.functional.decode import (
    xqa_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache_reference,
)
from precast._ops.attention.functional.trtllm_decode import (
    trtllm_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache_reference,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "batch_decode_with_paged_kv_cache_reference",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_reference",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_reference",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_reference",
]
