# SPDX-License-Identifier: Apache-2.0
"""The function between the two products of an expert in plain PyTorch.

Definitions of calls contain these functions, so they know functions by their numbers.
"""

from __future__ import annotations

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._ops.moe._rows import EPS, GROUP, is_row
from precast._ops.quantize._reference_8bit import group_quant

#: Members of ``ActivationType``; a test compares.
GELU, RELU, SILU, SWIGLU, GEGLU, SWIGLU_BIAS, RELU2, GEGLU_TANH, IDENTITY = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    9,
)


def pointwise(x: torch.Tensor, activation_type: int) -> torch.Tensor:
    """What a function does with its input, or with its gate."""
    if activation_type in (GELU, GEGLU):
        return torch.nn.functional.gelu(x)
    if activation_type == GEGLU_TANH:
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation_type in (SILU, SWIGLU):
        return torch.nn.functional.silu(x)
    if activation_type == RELU:
        return torch.relu(x)
    if activation_type == RELU2:
        return torch.relu(x).square()
    return x


def gated(
    up: torch.Tensor,
    gate: torch.Tensor,
    activation_type: int,
    alpha: torch.Tensor | None,
    beta: torch.Tensor | None,
    limit: torch.Tensor | None,
) -> torch.Tensor:
    """A function of both halves; the numbers are those of SwigluBias, in a column or one."""
    if activation_type != SWIGLU_BIAS:
        return pointwise(gate, activation_type) * up
    if limit is not None:
        gate, up = torch.minimum(gate, limit), torch.maximum(torch.minimum(up, limit), -limit)
    factor = torch.sigmoid(gate if alpha is None else alpha * gate)
    return gate * factor * (up if beta is None else up + beta)


def is_gated(activation_type: int) -> bool:
    """Whether half of the input is a gate of the other half."""
    return activation_type in (SWIGLU, GEGLU, SWIGLU_BIAS, GEGLU_TANH)


def activated(
    x: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_experts: torch.Tensor,
    activation_type: int,
    bias: torch.Tensor | None,
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    scale: torch.Tensor | None,
    quant_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """What all functions round, in float32 and times ``quant_scale``; zero behind the rows."""
    rows = int(expert_offsets[-1])
    y, experts = x[:rows].float(), row_experts[:rows]
    experts = torch.where(is_row(experts, len(expert_offsets) - 1), experts, 0).long()
    alpha, beta, limit, by = (
        numbers if numbers is None or numbers.numel() == 1 else numbers[experts, None]
        for numbers in (swiglu_alpha, swiglu_beta, swiglu_limit, quant_scale)
    )
    if scale is not None:
        y = y * scale[experts, None]
    if bias is not None:
        y = y + bias.float()[experts]
    if is_gated(activation_type):
        up, gate = y.chunk(2, dim=1)
        y = gated(up, gate, activation_type, alpha, beta, limit)
    else:
        y = pointwise(y, activation_type)
    if by is not None:
        y = y * by
    whole = y.new_zeros(len(x), y.shape[1])
    whole[:rows] = y
    return whole


def expert_activation_reference(
    x: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_experts: torch.Tensor,
    activation_type: int = SWIGLU,
    bias: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`expert_activation` in plain PyTorch on any device; rows of no expert are zero."""
    numbers = bias, swiglu_alpha, swiglu_beta, swiglu_limit, scale
    return activated(x, expert_offsets, row_experts, activation_type, *numbers).to(x.dtype)


def expert_activation_quant_reference(
    x: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_experts: torch.Tensor,
    quant_scale: torch.Tensor,
    activation_type: int = SWIGLU,
    bias: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`expert_activation_quant` in plain PyTorch; rows of no expert are zero."""
    numbers = bias, swiglu_alpha, swiglu_beta, swiglu_limit, scale, quant_scale
    y = activated(x, expert_offsets, row_experts, activation_type, *numbers)
    return saturated(y, torch.float8_e4m3fn)


def expert_activation_block_quant_reference(
    x: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_experts: torch.Tensor,
    activation_type: int = SWIGLU,
    bias: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`expert_activation_block_quant` in plain PyTorch; rows of no expert have codes 0."""
    numbers = bias, swiglu_alpha, swiglu_beta, swiglu_limit, scale
    y = activated(x, expert_offsets, row_experts, activation_type, *numbers)
    return group_quant(y, GROUP, EPS, torch.float8_e4m3fn)
