# SPDX-License-Identifier: Apache-2.0
"""Normalizations of rows: RMSNorm and LayerNorm, also fused with residual, gate, quantisation."""

from __future__ import annotations

from precast._ops.norm.fused_add_rmsnorm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_reference,
    gemma_fused_add_rmsnorm,
    gemma_fused_add_rmsnorm_reference,
)
from precast._ops.norm.fused_add_rmsnorm_fp8_block_quant import (
    fused_add_rmsnorm_fp8_block_quant,
    fused_add_rmsnorm_fp8_block_quant_reference,
)
from precast._ops.norm.gated_residual import (
    gated_residual_next_rmsnorm,
    gated_residual_next_rmsnorm_reference,
    gated_residual_rmsnorm,
    gated_residual_rmsnorm_reference,
)
from precast._ops.norm.layernorm import layernorm, layernorm_reference
from precast._ops.norm.norm_gate import (
    fused_rmsnorm_silu,
    fused_rmsnorm_silu_reference,
    rmsnorm_sigmoid_gate,
    rmsnorm_sigmoid_gate_reference,
)
from precast._ops.norm.norm_quant import (
    fused_add_rmsnorm_quant,
    fused_add_rmsnorm_quant_reference,
    layernorm_quant,
    layernorm_quant_reference,
    rmsnorm_quant,
    rmsnorm_quant_reference,
)
from precast._ops.norm.rmsnorm import (
    gemma_rmsnorm,
    gemma_rmsnorm_reference,
    rmsnorm,
    rmsnorm_reference,
)
from precast._ops.norm.supports import (
    supports_gated_residual_next_rmsnorm,
    supports_gated_residual_rmsnorm,
    supports_rmsnorm_sigmoid_gate,
)
from precast._ops.rope.fused_qk_rmsnorm_rope import (
    fused_qk_rmsnorm_rope,
    fused_qk_rmsnorm_rope_reference,
)

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_fp8_block_quant_reference",
    "fused_add_rmsnorm_quant",
    "fused_add_rmsnorm_quant_reference",
    "fused_add_rmsnorm_reference",
    "fused_qk_rmsnorm_rope",
    "fused_qk_rmsnorm_rope_reference",
    "fused_rmsnorm_silu",
    "fused_rmsnorm_silu_reference",
    "gated_residual_next_rmsnorm",
    "gated_residual_next_rmsnorm_reference",
    "gated_residual_rmsnorm",
    "gated_residual_rmsnorm_reference",
    "gemma_fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm_reference",
    "gemma_rmsnorm",
    "gemma_rmsnorm_reference",
    "layernorm",
    "layernorm_quant",
    "layernorm_quant_reference",
    "layernorm_reference",
    "rmsnorm",
    "rmsnorm_quant",
    "rmsnorm_quant_reference",
    "rmsnorm_reference",
    "rmsnorm_sigmoid_gate",
    "rmsnorm_sigmoid_gate_reference",
    "supports_gated_residual_next_rmsnorm",
    "supports_gated_residual_rmsnorm",
    "supports_rmsnorm_sigmoid_gate",
]
