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


def moe_activation_reference(
    input: torch.Tensor,
    row_experts: torch.Tensor | None = None,
    expert_offsets: torch.Tensor | None = None,
    activation_type: int = SWIGLU,
    bias: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    gate_first: bool = True,
    eps: float = EPS,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`moe_activation` in plain PyTorch on any device; rows of no expert are zero."""
    each = bias, swiglu_alpha, swiglu_beta, swiglu_limit, scale, quant_scale
    valid, of = rows_of_experts(input, row_experts, expert_offsets, each)
    y = input[valid].float()
    alpha, beta, limit, by = (
        numbers if numbers is None or numbers.numel() == 1 else numbers[of, None]
        for numbers in (swiglu_alpha, swiglu_beta, swiglu_limit, quant_scale)
    )
    if scale is not None:
        y = y * scale[of, None]
    if bias is not None:
        y = y + bias.float()[of]
    if is_gated(activation_type):
        first, second = y.chunk(2, dim=1)
        up, gate = (second, first) if gate_first else (first, second)
        y = gated(up, gate, activation_type, alpha, beta, limit)
    else:
        y = pointwise(y, activation_type)
    if by is not None:
        y = y * by
    whole = y.new_zeros(len(input), y.shape[1])
    whole[valid] = y
    if by is not None:
        return saturated(whole, torch.float8_e4m3fn)
    if out_dtype != torch.float8_e4m3fn:
        return whole.to(out_dtype)
    codes, scales = group_quant(whole, GROUP, eps, out_dtype)
    return codes, scales.where(valid[:, None], 0.0).mT.contiguous()


def rows_of_experts(
    x: torch.Tensor,
    row_experts: torch.Tensor | None,
    expert_offsets: torch.Tensor | None,
    each: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows belong to an expert, and the experts of these; ``each`` has what experts have.

    A number that is no expert stands for the first one.
    """
    valid = torch.ones(len(x), dtype=torch.bool, device=x.device)
    counts = [len(t) for t in each if t is not None and t.numel() != 1]
    if expert_offsets is not None:
        counts = [len(expert_offsets) - 1]
        valid = torch.arange(len(x), device=x.device) < expert_offsets[-1]
    experts = valid.int()
    if row_experts is not None:
        experts, valid = row_experts, valid & (row_experts >= 0)
    count = counts[0] if counts else 1
    if count == 0:
        valid = torch.zeros_like(valid)
    experts = experts[valid]
    return valid, torch.where(is_row(experts, count), experts, 0).long()
