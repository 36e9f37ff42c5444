# SPDX-License-Identifier: Apache-2.0
"""Products of groups of bf16 rows with weights of MXFP4, beside the same weights in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _gemm import GROUPS, output, starts
from _harness import Case
from _script import script

from precast._ops.gemm._w4 import dequantized
from precast.testing import Tolerance

DTYPES = ("bf16",)
#: Columns and depth of both products of gpt-oss's experts, padded to whole tiles; rows of each of
#: the experts.
LAYERS = ((5888, 2944), (2944, 2944))
TOKENS = (1, 8, 64, 512)
#: Sums of random numbers cancel.
CLOSE = Tolerance(2.0**-7, 0.5)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 256)


def _eager(
    a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, starts: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Weights become bf16 first; groups of equal size, whatever the starts say."""
    weights = torch.stack([dequantized(*pair)[0] for pair in zip(b[:, None], scales[:, None])])
    rows = a.view(len(b), -1, a.shape[1])
    return out.copy_(torch.bmm(rows, weights.bfloat16().mT).view(out.shape))


def _case(tokens: int, columns: int, depth: int) -> Case:
    rows = GROUPS * tokens

    def make() -> tuple[Any, ...]:
        scales = _bytes(GROUPS, columns // 64, depth // 128, 16, 16).clamp_(118, 123)
        a = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
        return a, _bytes(GROUPS, columns, depth // 2), scales, starts(tokens), output(rows, columns)

    return Case(
        "grouped_mm_mxfp4",
        f"{GROUPS} x [{tokens}, {depth}] x [{depth}, {columns}]",
        GROUPS * columns * depth * 17 // 32 + 2 * rows * (depth + columns),
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
