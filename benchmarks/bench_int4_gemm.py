# SPDX-License-Identifier: Apache-2.0
"""Products of groups of bf16 rows with weights of int4, beside the same weights in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _gemm import GROUPS, output, starts
from _harness import Case
from _script import script
from bench_mxfp4_gemm import CLOSE, LAYERS, TOKENS

from precast._ops.gemm._w4 import dequantized_int4

DTYPES = ("bf16",)


def _eager(
    a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, starts: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Weights become float32 first; groups of equal size, whatever the starts say."""
    weights = torch.stack([dequantized_int4(*pair)[0] for pair in zip(b[:, None], scales[:, None])])
    rows = a.view(len(b), -1, a.shape[1])
    return out.copy_(torch.bmm(rows.float(), weights.mT).view(out.shape))


def _case(tokens: int, columns: int, depth: int) -> Case:
    rows = GROUPS * tokens

    def make() -> tuple[Any, ...]:
        b = torch.empty(GROUPS, columns, depth // 2, dtype=torch.uint8, device="cuda")
        shape = GROUPS, columns // 64, depth // 128, 8, 8
        scales = (torch.rand(shape, device=b.device) / 64).bfloat16()
        a = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
        return a, b.random_(0, 256), scales, starts(tokens), output(rows, columns)

    return Case(
        "grouped_mm_int4",
        f"{GROUPS} x [{tokens}, {depth}] x [{depth}, {columns}]",
        GROUPS * columns * depth * 33 // 64 + 2 * rows * (depth + columns),
        make,
        bind=lambda gemm: gemm,
        eager=_eager,
        tolerances={4: CLOSE},
        close=CLOSE,
        flops=2 * rows * columns * depth,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for columns, depth in LAYERS:
        for tokens in TOKENS:
            yield _case(tokens, columns, depth)


if __name__ == "__main__":
    script(__file__)
