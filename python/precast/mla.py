# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA), as DeepSeek's models have it.

A token has one row of compressed keys and values for all heads, ``ckv``, and one of rotary keys,
``kpe``. With the up-projections absorbed into queries and outputs, each head attends to these rows
as they are: the values are the first columns of the keys.
"""

from __future__ import annotations

from precast._ops.mla.decode import (
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_batch_decode_with_kv_cache_mla_reference,
    xqa_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla_reference,
)
from precast._ops.mla.metadata import MLAPlanMetadata
from precast._ops.mla.reference import batch_mla_paged_attention_reference
from precast._ops.mla.wrapper import BatchMLAPagedAttentionWrapper

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
    "batch_mla_paged_attention_reference",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_batch_decode_with_kv_cache_mla_reference",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla_reference",
]
