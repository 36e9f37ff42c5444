# SPDX-License-Identifier: Apache-2.0
"""The fused mixture of experts in plain PyTorch: the references of its steps, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.torch import torch
from precast._ops.gemm.fp8_grouped import group_gemm_fp8_nt_groupwise_reference
from precast._ops.gemm.grouped_mm import grouped_mm_bf16_reference
from precast._ops.gemm.int4 import grouped_mm_int4_reference
from precast._ops.gemm.mxfp4 import grouped_mm_mxfp4_reference
from precast._ops.gemm.scaled_mm import grouped_mm_fp8_reference
from precast._ops.moe._activation_reference import (
    SWIGLU,
    SWIGLU_BIAS,
    moe_activation_reference,
)
from precast._ops.moe.moe_finalize import moe_finalize_reference
from precast._ops.moe.moe_permute import moe_permute_quant_reference, moe_permute_reference
from precast._ops.moe.moe_scale_columns import moe_scale_columns_reference
from precast._ops.moe.moe_sort import moe_sort_reference


def cutlass_fused_moe_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[torch.Tensor] | None = None,
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_rank: int = 0,
    ep_rank: int = 0,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_packed_weights: bool = False,
    activation_type: int = SWIGLU,
) -> torch.Tensor:
    """:func:`cutlass_fused_moe` in plain PyTorch on any device.

    Each step is float32 arithmetic and rounds once, to the dtype that the step's result has there.

    Returns
    -------
    torch.Tensor
        ``[tokens, hidden]`` of ``output_dtype``.
    """
    fc1, fc2, experts = fc1_expert_weights, fc2_expert_weights, len(fc1_expert_weights)
    numbers = swiglu_alpha, swiglu_beta, swiglu_limit
    if activation_type == SWIGLU and any(n is not None for n in numbers):
        activation_type = SWIGLU_BIAS
    scales = quant_scales or ()
    offsets, rows, of = moe_sort_reference(token_selected_experts, experts, ep_rank * experts)
    given = of, offsets, activation_type, fc1_expert_biases, *numbers
    second_scale = None
    if use_deepseek_fp8_block_scale:
        x, x_scale = moe_permute_quant_reference(input, rows)
        y = group_gemm_fp8_nt_groupwise_reference(
            x, fc1, x_scale, scales[0], offsets, "K", output_dtype
        )
        h, h_scale = moe_activation_reference(y, *given, gate_first=False)
        y = group_gemm_fp8_nt_groupwise_reference(
            h, fc2, h_scale.mT, scales[1], offsets, "K", output_dtype
        )
    elif fc1.dtype == torch.float8_e4m3fn:
        first_scale, quant_scale, second_scale = scales[:3]
        x = moe_permute_reference(input, rows)
        y = grouped_mm_fp8_reference(x, fc1, offsets)
        h = moe_activation_reference(y, *given, first_scale, quant_scale, gate_first=False)
        y = grouped_mm_fp8_reference(h, fc2, offsets)
    elif use_w4_group_scaling and use_packed_weights:
        of_fc1, of_fc2, *others = scales
        of_tokens, of_active, _, _, first_scale, second_scale = (
            t if t.numel() else None for t in others
        )
        x = moe_permute_reference(_rounded(input, of_tokens), rows)
        y = grouped_mm_int4_reference(x, fc1, of_fc1, offsets, input.dtype)
        h = moe_activation_reference(
            y, *given, first_scale, gate_first=False, out_dtype=input.dtype
        )
        y = grouped_mm_int4_reference(_rounded(h, of_active), fc2, of_fc2, offsets, input.dtype)
    elif use_w4_group_scaling:
        of_fc1, of_fc2 = (scale.view(torch.uint8) for scale in scales)
        x = moe_permute_reference(input, rows)
        y = grouped_mm_mxfp4_reference(x, fc1, of_fc1, offsets, output_dtype)
        h = moe_activation_reference(y, *given, gate_first=False, out_dtype=output_dtype)
        y = grouped_mm_mxfp4_reference(h, fc2, of_fc2, offsets, output_dtype)
    else:
        x = moe_permute_reference(input, rows)
        y = grouped_mm_bf16_reference(x, fc1, offsets, output_dtype)
        h = moe_activation_reference(y, *given, gate_first=False, out_dtype=output_dtype)
        y = grouped_mm_bf16_reference(h, fc2, offsets, output_dtype)
    bias = fc2_expert_biases if tp_rank == 0 else None
    return moe_finalize_reference(y, rows, token_final_scales, of, second_scale, bias, output_dtype)


def _rounded(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return moe_scale_columns_reference(x, None if scale is None else scale.view(-1))
