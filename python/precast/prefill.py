# SPDX-License-Identifier: Apache-2.0
"""Prefill attention: many queries of each request over its keys and values."""

from __future__ import annotations

from precast._ops.attention.batch_reference import (
    batch_prefill_with_paged_kv_cache_reference,
    batch_prefill_with_ragged_kv_cache_reference,
)
from precast._ops.attention.functional.context import (
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_context_with_kv_cache_reference,
)
from precast._ops.attention.functional.fmha_v2 import (
    trtllm_fmha_v2_prefill,
    trtllm_fmha_v2_prefill_reference,
)
from precast._ops.attention.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from precast._ops.attention.prefill.ragged import BatchPrefillWithRaggedKVCacheWrapper
from precast._ops.attention.prefill.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_reference,
    single_prefill_with_kv_cache_return_lse,
)

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "batch_prefill_with_paged_kv_cache_reference",
    "batch_prefill_with_ragged_kv_cache_reference",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_reference",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_context_with_kv_cache_reference",
    "trtllm_fmha_v2_prefill",
    "trtllm_fmha_v2_prefill_reference",
]
