# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of a sum with a residual, with fp8 output by groups of 128 columns.

With 16-bit rows it moves 7 1/32 bytes an element, and 2 more if the norm itself is also an output.
The parts, ``fused_add_rmsnorm`` and a quantisation by groups, move 8 + 3 1/32. So by bytes the
fused op takes 0.64 (0.82) of their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case, Parts
from _script import script
from torch.nn import functional

import precast
from precast.testing import poison, tolerance_of_scales

EPS = 1e-6
FP8 = torch.float8_e4m3fn
ROWS = [(m, 7168) for m in (1, 64, 1024, 8192)] + [(16384, 4096)]

Function = Callable[..., Any]


def _eager(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor,
    w: torch.Tensor,
) -> None:
    total = x.float() + residual.float()
    residual.copy_(total)
    y = functional.rms_norm(total, (x.shape[-1],), w.float(), EPS).to(x.dtype)
    if normed_out is not None:
        normed_out.copy_(y)
    groups = y.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448.0
    block_scale[:, : x.shape[0]].copy_(scale.t())
    out.copy_((groups / scale.unsqueeze(-1)).clamp(-448.0, 448.0).to(FP8).flatten(-2))


def _parts(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor,
    w: torch.Tensor,
) -> None:
    """``normed_out`` is left out: the norm lies in ``x``."""
    precast.fused_add_rmsnorm(x, residual, w, EPS)
    scales = block_scale[:, : x.shape[0]].t()
    precast.per_token_group_quant_8bit(x, 128, out=out, out_scale=scales)


def _bind(fn: Function) -> Function:
    return lambda *args: fn(*args, EPS)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    def make(rows: int, hidden: int, normed: bool) -> tuple[torch.Tensor | None, ...]:
        bits = torch.empty(rows, hidden, dtype=torch.uint8, device="cuda")
        padded = -(-rows // 4) * 4
        # The padding is not written, so it must not differ.
        scales = torch.empty(hidden // 128, padded, dtype=torch.float32, device="cuda").fill_(7.0)
        x, residual = randn(rows, hidden), randn(rows, hidden)
        normed_out = poison(torch.empty_like(x)) if normed else None
        return bits.fill_(0x7F).view(FP8), scales, normed_out, x, residual, randn(hidden)

    for normed in (True, False):
        for rows, hidden in ROWS:
            element = 2 + 2 + 2 + 1 + (2 if normed else 0)
            scales = 4 * rows * (hidden // 128)
            yield Case(
                "fused_add_rmsnorm_fp8_block_quant",
                f"[{rows}, {hidden}]" + ("" if normed else " without normed_out"),
                element * rows * hidden + scales,
                lambda rows=rows, hidden=hidden, normed=normed: make(rows, hidden, normed),
                _bind,
                _eager,
                dtype=dtype,
                parts=Parts(_parts, (8 + 3) * rows * hidden + scales),
                tolerances={1: tolerance_of_scales(dtype)},  # block_scale
            )


if __name__ == "__main__":
    script(__file__)
