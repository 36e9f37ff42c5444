# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: appending to it, as it is or quantised, and its index arithmetic."""

from __future__ import annotations

from precast._ops.paged.append import (
    append_paged_kv_cache,
    append_paged_kv_cache_reference,
    append_paged_kv_cache_with_slot_mapping,
    append_paged_kv_cache_with_slot_mapping_reference,
    append_paged_mla_kv_cache,
    append_paged_mla_kv_cache_reference,
    append_paged_mla_kv_cache_with_slot_mapping,
    append_paged_mla_kv_cache_with_slot_mapping_reference,
)
from precast._ops.paged.fp8 import (
    fp8_quantize_append_paged_kv_cache_with_slot_mapping,
    fp8_quantize_append_paged_kv_cache_with_slot_mapping_reference,
    fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping,
    fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping_reference,
)
from precast._ops.paged.positions import (
    get_batch_indices_positions,
    get_batch_indices_positions_reference,
    get_seq_lens,
)
from precast._ops.quantize.nvfp4_append import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_reference,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_reference,
)

__all__ = [
    "append_paged_kv_cache",
    "append_paged_kv_cache_reference",
    "append_paged_kv_cache_with_slot_mapping",
    "append_paged_kv_cache_with_slot_mapping_reference",
    "append_paged_mla_kv_cache",
    "append_paged_mla_kv_cache_reference",
    "append_paged_mla_kv_cache_with_slot_mapping",
    "append_paged_mla_kv_cache_with_slot_mapping_reference",
    "fp8_quantize_append_paged_kv_cache_with_slot_mapping",
    "fp8_quantize_append_paged_kv_cache_with_slot_mapping_reference",
    "fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping",
    "fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping_reference",
    "get_batch_indices_positions",
    "get_batch_indices_positions_reference",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_reference",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_reference",
]
