# SPDX-License-Identifier: Apache-2.0
"""SwiGLU with 8-bit quantisation: gate and up read once, codes written once.

Compared with ``silu_and_mul`` and a separate quantisation it saves the write and the read of the
product: it moves 4 + 1 bytes an element instead of 4 + 2 + 2 + 1, a ratio of 1.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case, Parts
from _script import script
from torch.nn import functional

import precast
from precast.testing import poison

GROUP = 128
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
HIDDEN = 7168
ROWS = (1, 64, 1024, 8192)


def _product(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return functional.silu(gate) * up


def _encode(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (y * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(E4M3)


def _group(x: torch.Tensor, *outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y = _product(x).unflatten(-1, (-1, GROUP))
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return _encode(y, scale).flatten(-2), scale.squeeze(-1)


def _token(x: torch.Tensor, *outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y = _product(x)
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return _encode(y, scale), scale


def _static(x: torch.Tensor, scale: torch.Tensor, *outputs: Any) -> torch.Tensor:
    return _encode(_product(x), scale)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def make(rows: int, scales: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn((rows, 2 * HIDDEN), dtype=dtype, device="cuda")
        codes = poison(torch.empty((rows, HIDDEN), dtype=E4M3, device="cuda"))
        return x, codes, torch.empty((rows, scales), device="cuda").fill_(0.01)

    def one(rows: int) -> tuple[torch.Tensor, ...]:
        x, codes, scales = make(rows, 1)
        return x, scales[0], codes

    def group(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, out, scales: fn(x, GROUP, out=out, out_scale=scales)

    def token(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, out, scales: fn(x, out=out, out_scale=scales)

    def static(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, scale, out: fn(x, scale, out=out)

    def in_turn(name: str, bind: Callable[..., Any]) -> Callable[..., Any]:
        """The product in memory, then its quantisation, whose scales come after the codes."""
        quantise = bind(getattr(precast, name))
        if name == "static_quant_fp8":
            return lambda x, scale, out: quantise(precast.silu_and_mul(x), scale, out)
        return lambda x, out, scales: quantise(precast.silu_and_mul(x), out, scales)

    for rows in ROWS:
        for op, part, scales, bind, eager in (
            (
                "silu_and_mul_per_token_group_quant",
                "per_token_group_quant_8bit",
                HIDDEN // GROUP,
                group,
                _group,
            ),
            ("silu_and_mul_per_token_quant", "per_token_quant_fp8", 1, token, _token),
            ("silu_and_mul_quant", "static_quant_fp8", 0, static, _static),
        ):
            least = rows * HIDDEN * (2 * dtype.itemsize + 1) + 4 * rows * scales
            yield Case(
                op,
                f"[{rows}, 2x{HIDDEN}]",
                least,
                (lambda rows=rows, scales=scales: make(rows, scales) if scales else one(rows)),
                bind,
                eager,
                # The product is written and read once more.
                parts=Parts(in_turn(part, bind), least + 2 * rows * HIDDEN * dtype.itemsize),
            )


if __name__ == "__main__":
    script(__file__)
