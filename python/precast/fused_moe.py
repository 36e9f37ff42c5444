# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: which experts a token goes to, and what surrounds their products.

:func:`moe_activation` stands between the two grouped products of FP8 experts, :func:`moe_finalize`
behind the second one.
"""

from __future__ import annotations

from precast._ops.moe.fused_topk_deepseek import (
    fused_topk_deepseek,
    fused_topk_deepseek_reference,
)
from precast._ops.moe.hash_topk import hash_topk, hash_topk_reference
from precast._ops.moe.moe_activation import moe_activation, moe_activation_reference
from precast._ops.moe.moe_finalize import moe_finalize, moe_finalize_reference

__all__ = [
    "fused_topk_deepseek",
    "fused_topk_deepseek_reference",
    "hash_topk",
    "hash_topk_reference",
    "moe_activation",
    "moe_activation_reference",
    "moe_finalize",
    "moe_finalize_reference",
]
