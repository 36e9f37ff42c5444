# SPDX-License-Identifier: Apache-2.0
"""Normalizations of rows: RMSNorm, alone and fused with a residual, and LayerNorm."""

from __future__ import annotations

from precast.norm.fused_add_rmsnorm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_reference,
    gemma_fused_add_rmsnorm,
    gemma_fused_add_rmsnorm_reference,
)
from precast.norm.layernorm import layernorm, layernorm_reference
from precast.norm.rmsnorm import gemma_rmsnorm, gemma_rmsnorm_reference, rmsnorm, rmsnorm_reference

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_reference",
    "gemma_fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm_reference",
    "gemma_rmsnorm",
    "gemma_rmsnorm_reference",
    "layernorm",
    "layernorm_reference",
    "rmsnorm",
    "rmsnorm_reference",
]
