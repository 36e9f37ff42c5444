# SPDX-License-Identifier: Apache-2.0
"""The norms with fp8 output by a given scale.

A norm and a separate quantisation write the norm and read it again. With 16-bit rows they move 7
bytes an element (11 with a residual), and the fused op moves 3 (7). So by bytes it takes 3/7 = 0.43
(7/11 = 0.64) of the time of the parts. ``bench_norm.py`` measures the norms alone at the same
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case, Parts
from _script import script
from torch.nn import functional

import precast

EPS = 1e-6
FP8 = torch.float8_e4m3fn
ROWS = [(m, h) for h in (4096, 8192) for m in (1, 64, 1024, 16384)]
LAYERNORM = [(1024, 4096), (16384, 8192)]
# Bytes an element of 16 bits: what is read and written. The parts also write the norm and read it.
PLAIN, FUSED, PARTS = 2 + 1, 2 + 2 + 2 + 1, 2 + 2

Function = Callable[..., Any]


def _quantized(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (y / scale).clamp(-448.0, 448.0).to(FP8)


def _eager_norm(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> None:
    y = functional.rms_norm(x.float(), (x.shape[-1],), w.float(), EPS)
    out.copy_(_quantized(y, scale))


def _eager_fused(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    total = x.float() + residual.float()
    residual.copy_(total)
    y = functional.rms_norm(total, (x.shape[-1],), w.float(), EPS)
    out.copy_(_quantized(y, scale))


def _eager_layer(
    out: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    y = functional.layer_norm(x.float(), (x.shape[-1],), gamma, beta, EPS)
    out.copy_(_quantized(y, scale))


def _norm_and_quantise(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor
) -> None:
    precast.static_quant_fp8(precast.rmsnorm(x, w, EPS), scale, out=out)


def _fused_and_quantise(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    precast.fused_add_rmsnorm(x, residual, w, EPS)  # The norm lies in x then.
    precast.static_quant_fp8(x, scale, out=out)


def _layer_and_quantise(
    out: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    precast.static_quant_fp8(precast.layernorm(x, gamma, beta, EPS), scale, out=out)


def _bind(fn: Function) -> Function:
    return lambda *args: fn(*args, EPS)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def randn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    def out_of(rows: int, hidden: int) -> torch.Tensor:
        bits = torch.empty(rows, hidden, dtype=torch.uint8, device="cuda")
        return bits.fill_(0x7F).view(FP8)  # NaN

    def scale() -> torch.Tensor:
        return torch.empty(1, dtype=torch.float32, device="cuda").fill_(0.02)

    def plain(rows: int, hidden: int) -> tuple[torch.Tensor, ...]:
        return out_of(rows, hidden), randn(rows, hidden), randn(hidden), scale()

    def fused(rows: int, hidden: int) -> tuple[torch.Tensor, ...]:
        x, residual = randn(rows, hidden), randn(rows, hidden)
        return out_of(rows, hidden), x, residual, randn(hidden), scale()

    def layer(rows: int, hidden: int) -> tuple[torch.Tensor, ...]:
        gamma, beta = (randn(hidden, dtype=torch.float32) for _ in range(2))
        return out_of(rows, hidden), randn(rows, hidden), gamma, beta, scale()

    kinds: list[tuple[str, list[tuple[int, int]], int, Function, Function, Function]] = [
        # op, shapes, bytes an element, arguments, plain PyTorch, parts
        ("rmsnorm_quant", ROWS, PLAIN, plain, _eager_norm, _norm_and_quantise),
        ("fused_add_rmsnorm_quant", ROWS, FUSED, fused, _eager_fused, _fused_and_quantise),
        ("layernorm_quant", LAYERNORM, PLAIN, layer, _eager_layer, _layer_and_quantise),
    ]
    for op, shapes, element, make, eager, parts in kinds:
        for rows, hidden in shapes:
            yield Case(
                op,
                f"[{rows}, {hidden}]",
                element * rows * hidden,
                lambda make=make, rows=rows, hidden=hidden: make(rows, hidden),
                _bind,
                eager,
                dtype=dtype,
                parts=Parts(parts, (element + PARTS) * rows * hidden),
            )


if __name__ == "__main__":
    script(__file__)
