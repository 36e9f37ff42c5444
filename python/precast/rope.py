# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of queries and keys: alone, after a norm, and with quantisation."""

from __future__ import annotations

from precast._ops.rope.apply_llama31_rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_llama31_rope_pos_ids_reference,
    apply_llama31_rope_reference,
)
from precast._ops.rope.apply_rope import (
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_pos_ids_reference,
    apply_rope_reference,
)
from precast._ops.rope.cos_sin_cache import (
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
    apply_rope_with_cos_sin_cache_reference,
)
from precast._ops.rope.qk_rmsnorm_rope import qk_rmsnorm_rope, qk_rmsnorm_rope_reference
from precast._ops.rope.quantize import (
    mla_rope_quantize_fp8,
    mla_rope_quantize_fp8_reference,
    rope_quantize_fp8,
    rope_quantize_fp8_reference,
)
from precast._ops.rope.quantize_append import (
    rope_quantize_fp8_append_paged_kv_cache,
    rope_quantize_fp8_append_paged_kv_cache_reference,
)

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_llama31_rope_pos_ids_reference",
    "apply_llama31_rope_reference",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_pos_ids_reference",
    "apply_rope_reference",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "apply_rope_with_cos_sin_cache_reference",
    "mla_rope_quantize_fp8",
    "mla_rope_quantize_fp8_reference",
    "qk_rmsnorm_rope",
    "qk_rmsnorm_rope_reference",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
    "rope_quantize_fp8_append_paged_kv_cache_reference",
    "rope_quantize_fp8_reference",
]
