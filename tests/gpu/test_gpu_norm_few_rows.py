# SPDX-License-Identifier: Apache-2.0
"""Few long rows, which several CTAs may share: as with more rows, of which each has one CTA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_case import same_bits
from test_gpu_norm_quant import DEVICE, E4M3, EPS, draw, fp8_like

import precast
from precast.testing import Guarded

MANY = 96
Outputs = tuple[torch.Tensor, ...]
Op = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]


def plain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Outputs:
    precast.fused_add_rmsnorm(x, residual, weight, EPS)
    return x, residual


def gemma(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Outputs:
    precast.gemma_fused_add_rmsnorm(x, residual, weight, EPS)
    return x, residual


def quant(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Outputs:
    out = Guarded(x.shape, E4M3, DEVICE)
    scale = torch.full((1,), 0.03, device=DEVICE)
    precast.fused_add_rmsnorm_quant(out.view, x, residual, weight, scale, EPS)
    out.check()
    return out.view, residual


def block_quant(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Outputs:
    rows, hidden = x.shape
    out, normed = fp8_like(x), torch.empty_like(x)
    scales = torch.empty(rows, hidden // 128, device=DEVICE)
    precast.fused_add_rmsnorm_fp8_block_quant(
        out, scales, normed, x, residual, weight, EPS, column_major_scales=False
    )
    return out, scales, normed, residual


def gate(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Outputs:
    precast.rmsnorm_sigmoid_gate(x, residual, weight=weight)
    return (x,)


@pytest.mark.parametrize("op", [plain, gemma, quant, block_quant, gate])
@pytest.mark.parametrize("hidden", [4096, 4224, 5376, 7168, 8192])
def test_few_rows_have_the_bits_of_more(op: Op, hidden: int, generator: torch.Generator) -> None:
    x, residual = draw(generator, MANY, hidden), draw(generator, MANY, hidden)
    weight = draw(generator, hidden)
    want = op(x.clone(), residual.clone(), weight)
    for rows in (1, 2, 17, 64):
        for out, wanted in zip(
            op(x[:rows].clone(), residual[:rows].clone(), weight), want, strict=True
        ):
            assert same_bits(out, wanted[:rows]), f"{rows} rows"


def test_few_rows_of_packed_tensors(generator: torch.Generator) -> None:
    packed, residual, weight = (
        draw(generator, *shape) for shape in ((9, 12672), (9, 4224), (4224,))
    )
    before, x = packed.clone(), packed[:, 4224:8448]
    want = plain(x.clone(), residual.clone(), weight)
    got = plain(x, residual, weight)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    packed[:, 4224:8448] = before[:, 4224:8448]
    assert torch.equal(packed, before), "the gaps were written"
