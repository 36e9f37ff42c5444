# SPDX-License-Identifier: Apache-2.0
"""The fused mixture of experts in plain PyTorch: expert by expert, in float32."""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._ops.moe._activation_reference import (
    SWIGLU,
    SWIGLU_BIAS,
    gated,
    is_gated,
    pointwise,
)
from precast._ops.moe._rows import EPS, GROUP
from precast._ops.quantize._reference_8bit import group_quant


def quantised_groups(x: torch.Tensor) -> torch.Tensor:
    """What float32 ``x`` is after e4m3 with a scale for each 128 columns."""
    codes, scales = group_quant(x, GROUP, EPS, torch.float8_e4m3fn)
    return codes.float() * scales.repeat_interleave(GROUP, 1)


def block_weight(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """An e4m3 weight ``[n, k]`` with scales of blocks of 128 x 128, in float32."""
    of_rows = scales.repeat_interleave(GROUP, 0)[: weight.shape[0]]
    return weight.float() * of_rows.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


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
    activation_type: int = SWIGLU,
) -> torch.Tensor:
    """:func:`cutlass_fused_moe` in plain PyTorch on any device, in float32.

    Only what the mode quantises is rounded before the end: tokens and activations of FP8.

    Returns
    -------
    torch.Tensor
        ``[tokens, hidden]`` of ``output_dtype``.
    """
    is_fp8 = fc1_expert_weights.dtype == torch.float8_e4m3fn
    numbers = swiglu_alpha, swiglu_beta, swiglu_limit
    if activation_type == SWIGLU and any(n is not None for n in numbers):
        activation_type = SWIGLU_BIAS
    sums = torch.zeros(
        len(input), fc2_expert_weights.shape[1], dtype=torch.float32, device=input.device
    )
    for expert in range(len(fc1_expert_weights)):
        chosen = token_selected_experts == expert + ep_rank * len(fc1_expert_weights)
        token, slot = chosen.nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        x = input[token].float()
        first, second = fc1_expert_weights[expert], fc2_expert_weights[expert]
        if use_deepseek_fp8_block_scale and quant_scales is not None:
            x = quantised_groups(x)
            y = x @ block_weight(first, quant_scales[0][expert]).T
        else:
            y = x @ first.float().T
            if is_fp8 and quant_scales is not None:
                y = y * quant_scales[0][expert]
        if fc1_expert_biases is not None:
            y = y + fc1_expert_biases[expert].float()
        if is_gated(activation_type):
            up, gate = y.chunk(2, dim=1)
            alpha, beta, limit = (None if n is None else n[expert] for n in numbers)
            y = gated(up, gate, activation_type, alpha, beta, limit)
        else:
            y = pointwise(y, activation_type)
        if use_deepseek_fp8_block_scale and quant_scales is not None:
            y = quantised_groups(y) @ block_weight(second, quant_scales[1][expert]).T
        elif is_fp8 and quant_scales is not None:
            by = quant_scales[1]
            codes = saturated(y * (by[expert] if by.numel() > 1 else by), torch.float8_e4m3fn)
            y = codes.float() @ second.float().T * quant_scales[2][expert]
        else:
            y = y @ second.float().T
        if fc2_expert_biases is not None and tp_rank == 0:
            y = y + fc2_expert_biases[expert].float()
        if token_final_scales is not None:
            y = y * token_final_scales[token, slot, None]
        sums.index_add_(0, token, y)
    return sums.to(output_dtype)
