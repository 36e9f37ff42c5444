# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: which experts a token goes to, with what weights, and what they compute.

:func:`moe_activation` stands between the two grouped products of FP8 experts, :func:`moe_finalize`
behind the second one. :func:`bgmv_moe` computes what low-rank adapters (LoRA) add.
:func:`mono_moe` routes at most eight tokens and computes their FP8 experts.
"""

from __future__ import annotations

from precast._ops.moe._activation_reference import moe_activation_reference
from precast._ops.moe._fused_reference import cutlass_fused_moe_reference
from precast._ops.moe.bgmv_moe import bgmv_moe, bgmv_moe_reference, fill_w_ptr, has_bgmv_moe
from precast._ops.moe.bgmv_moe_expand import bgmv_moe_expand, bgmv_moe_expand_reference
from precast._ops.moe.bgmv_moe_shrink import bgmv_moe_shrink, bgmv_moe_shrink_reference
from precast._ops.moe.cutlass_fused_moe import (
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
)
from precast._ops.moe.fused_topk_deepseek import (
    fused_topk_deepseek,
    fused_topk_deepseek_reference,
)
from precast._ops.moe.hash_topk import hash_topk, hash_topk_reference
from precast._ops.moe.mixed_gemm import (
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
)
from precast._ops.moe.moe_activation import moe_activation
from precast._ops.moe.moe_finalize import moe_finalize, moe_finalize_reference
from precast._ops.moe.moe_permute import (
    moe_permute,
    moe_permute_quant,
    moe_permute_quant_reference,
    moe_permute_reference,
)
from precast._ops.moe.moe_scale_columns import moe_scale_columns, moe_scale_columns_reference
from precast._ops.moe.moe_sort import moe_sort, moe_sort_reference
from precast._ops.moe.mono_moe import (
    alloc_scratchpad,
    get_scratchpad_size_bytes,
    has_monomoe,
    interleave_for_tma_wgmma_up,
    mono_moe,
    mono_moe_reference,
)

__all__ = [
    "alloc_scratchpad",
    "bgmv_moe",
    "bgmv_moe_expand",
    "bgmv_moe_expand_reference",
    "bgmv_moe_reference",
    "bgmv_moe_shrink",
    "bgmv_moe_shrink_reference",
    "cutlass_fused_moe",
    "cutlass_fused_moe_reference",
    "cutlass_fused_moe_workspace_size",
    "fill_w_ptr",
    "fused_topk_deepseek",
    "fused_topk_deepseek_reference",
    "get_scratchpad_size_bytes",
    "has_bgmv_moe",
    "has_monomoe",
    "hash_topk",
    "hash_topk_reference",
    "interleave_for_tma_wgmma_up",
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "moe_activation",
    "moe_activation_reference",
    "moe_finalize",
    "moe_finalize_reference",
    "moe_permute",
    "moe_permute_quant",
    "moe_permute_quant_reference",
    "moe_permute_reference",
    "moe_scale_columns",
    "moe_scale_columns_reference",
    "moe_sort",
    "moe_sort_reference",
    "mono_moe",
    "mono_moe_reference",
]
