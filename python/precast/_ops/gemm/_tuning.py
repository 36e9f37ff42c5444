# SPDX-License-Identifier: Apache-2.0
"""Calls of the block-scaled products on Hopper with each of their choices, to measure them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._ops.gemm._fp8 import BLOCK
from precast._ops.gemm.fp8_gemm import _GEMM_SM90
from precast._ops.gemm.fp8_grouped import _COUNTED, _INDEXED, _RANGES
from precast._plan.gemm_model import Choice
from precast._plan.gemm_table import Shape

Call = Callable[..., None]


def arguments(shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Arguments of a product: numbers of all sizes, scales in the layout of their function."""
    kind, groups, m, n, k = shape
    blocks = -(-k // BLOCK)

    def codes(*size: int) -> torch.Tensor:
        # 0 to 119 are the finite positive codes but the largest.
        found = torch.randint(0, 120, size, dtype=torch.uint8, device=device)
        return found.view(torch.float8_e4m3fn)

    def scales(*size: int) -> torch.Tensor:
        return torch.rand(size, device=device)

    def out(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device)

    if kind == "plain":
        # As the quantisation of an engine writes them: in columns that begin at 16 bytes.
        a_scale = scales(blocks, -(-m // 4) * 4)[:, :m].T
        return codes(m, k), codes(n, k), a_scale, scales(-(-n // BLOCK), blocks), out(m, n)
    b, b_scale = codes(groups, n, k), scales(groups, -(-n // BLOCK), blocks)
    if kind == "masked":
        a_scale = scales(groups, blocks, -(-m // 4) * 4)[..., :m].mT
        counts = torch.full((groups,), m, dtype=torch.int32, device=device)
        return codes(groups, m, k), b, a_scale, b_scale, counts, out(groups, m, n)
    tokens = m if kind == "contiguous" else m * groups
    if kind == "contiguous":
        block = torch.arange(tokens, dtype=torch.int32, device=device) // BLOCK
        of_token = block * groups // max(1, -(-tokens // BLOCK))
        a_scale = scales(blocks, -(-tokens // 4) * 4)[:, :tokens].T
        return codes(tokens, k), b, a_scale, b_scale, of_token, out(tokens, n)
    starts = torch.arange(groups + 1, dtype=torch.int32, device=device) * m
    return codes(tokens, k), b, scales(tokens, blocks), b_scale, starts, out(tokens, n)


def call(shape: Shape, choice: Choice) -> Call:
    """What runs the product of :func:`arguments` with a choice."""
    number = choice.number

    def run(*given: Any) -> None:
        if shape.kind == "plain":
            _GEMM_SM90.launch(*given, True, True, 1, number)
        elif shape.kind == "masked":
            _COUNTED[1].launch(*given, shape.m, number)
        elif shape.kind == "contiguous":
            _INDEXED[1].launch(*given, number)
        else:
            _RANGES[1].launch(*given, True, number)

    return run
