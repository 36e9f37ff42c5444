# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's second place for ops that DeepSeek-V3 uses."""

from __future__ import annotations

from precast._ops.elementwise.concat_ops import concat_mla_k
from precast._ops.gemm.router import mm_M1_16_K7168_N128, mm_M1_16_K7168_N256
from precast._ops.moe.fused_topk_deepseek import fused_topk_deepseek

__all__ = [
    "concat_mla_k",
    "fused_topk_deepseek",
    "mm_M1_16_K7168_N128",
    "mm_M1_16_K7168_N256",
]
