# SPDX-License-Identifier: Apache-2.0
"""Calls of the products on Hopper with each of their choices, to measure them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._ops.gemm._fp8 import BLOCK
from precast._ops.gemm.fp8_gemm import _GEMM_SM90
from precast._ops.gemm.fp8_grouped import _COUNTED, _INDEXED, _RANGES
from precast._ops.gemm.grouped_mm import _GROUPED_SM90
from precast._ops.gemm.mm_bf16 import _BMM_SM90, _MM_SM90
from precast._ops.gemm.scaled_mm import _BMM_SM90 as _SCALED_BMM_SM90
from precast._ops.gemm.scaled_mm import _GROUPED_SM90 as _SCALED_GROUPED_SM90
from precast._ops.gemm.scaled_mm import _SCALED_MM_SM90
from precast._plan.gemm_model import Choice
from precast._plan.gemm_table import Shape

Call = Callable[..., None]
Tensors = tuple[torch.Tensor, ...]


def arguments(shape: Shape, device: torch.device) -> Tensors:
    """Arguments of a product: numbers of all sizes, scales in the layout of their function."""
    return _ARGUMENTS[shape.operands](shape, device)


def call(shape: Shape, choice: Choice) -> Call:
    """What runs the product of :func:`arguments` with a choice."""
    launch, *others = _LAUNCHES[shape.operands][shape.kind]

    def run(*given: Any) -> None:
        launch(*given, *(shape.m if other is _EXPECTED else other for other in others), choice[0])

    return run


def _codes(*size: int, device: torch.device) -> torch.Tensor:
    # 0 to 119 are the finite positive codes but the largest.
    found = torch.randint(0, 120, size, dtype=torch.uint8, device=device)
    return found.view(torch.float8_e4m3fn)


def _out(*size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=device)


def _starts(shape: Shape, device: torch.device) -> torch.Tensor:
    return torch.arange(shape.groups + 1, dtype=torch.int32, device=device) * shape.m


def _block_arguments(shape: Shape, device: torch.device) -> Tensors:
    kind, groups, m, n, k, _ = shape
    blocks = -(-k // BLOCK)

    def codes(*size: int) -> torch.Tensor:
        return _codes(*size, device=device)

    def scales(*size: int) -> torch.Tensor:
        return torch.rand(size, device=device)

    def out(*size: int) -> torch.Tensor:
        return _out(*size, device=device)

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
    starts = _starts(shape, device)
    return codes(tokens, k), b, scales(tokens, blocks), b_scale, starts, out(tokens, n)


def _row_arguments(shape: Shape, device: torch.device) -> Tensors:
    """With a scale for each row, as engines quantise; groups have one for all."""
    kind, groups, m, n, k, _ = shape
    one = torch.ones(1, device=device)
    if kind == "plain":
        scales = torch.rand(m, 1, device=device), torch.rand(1, n, device=device)
        a, b = _codes(m, k, device=device), _codes(n, k, device=device)
        return a, b.T, *scales, _out(m, n, device=device)
    b = _codes(groups, n, k, device=device)
    if kind == "batched":
        a = _codes(groups, m, k, device=device)
        return a, b.mT, one, one, _out(groups, m, n, device=device)
    a = _codes(groups * m, k, device=device)
    return a, b, _starts(shape, device), one, _out(groups * m, n, device=device)


def _bf16_arguments(shape: Shape, device: torch.device) -> Tensors:
    kind, groups, m, n, k, _ = shape

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).bfloat16()

    if kind == "plain":
        return numbers(m, k), numbers(n, k).T, _out(m, n, device=device)
    b = numbers(groups, n, k)
    if kind == "batched":
        return numbers(groups, m, k), b.mT, _out(groups, m, n, device=device)
    a = numbers(groups * m, k)
    return a, b, _starts(shape, device), _out(groups * m, n, device=device)


def _mm_bf16(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, choice: int) -> None:
    _MM_SM90.launch(a, b, None, out, choice, True)


_ARGUMENTS = {"fp8_block": _block_arguments, "fp8_row": _row_arguments, "bf16": _bf16_arguments}
#: Stands for the tokens of a group that a call expects.
_EXPECTED = object()
#: What launches a kind of groups, and what it takes between :func:`arguments` and the choice.
_LAUNCHES: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8_block": {
        "plain": (_GEMM_SM90.launch, True, True, 1),
        "masked": (_COUNTED[1].launch, _EXPECTED),
        "ranges": (_RANGES[1].launch, True),
        "contiguous": (_INDEXED[1].launch,),
    },
    "fp8_row": {
        "plain": (_SCALED_MM_SM90.launch, None),
        "batched": (_SCALED_BMM_SM90.launch,),
        "ranges": (_SCALED_GROUPED_SM90.launch,),
    },
    "bf16": {
        "plain": (_mm_bf16,),
        "batched": (_BMM_SM90.launch,),
        "ranges": (_GROUPED_SM90.launch,),
    },
}
