# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 matrices, alone, in batches and in groups, beside cuBLAS's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _gemm import GROUPS, case_of, output, starts
from _harness import Case
from _script import script

from precast.testing import Tolerance

DTYPES = ("bf16",)
#: Columns and depth: layers of Llama-3 8B and 70B, a layer of few columns, a cube.
LAYERS = ((6144, 4096), (4096, 14336), (10240, 8192), (2112, 7168), (8192, 8192))
ROWS = (1, 16, 64, 512, 4096)
#: Batches, or experts of a GPU: columns, depth, and rows of each.
EXPERTS = ((4096, 7168), (1536, 2048))
TOKENS = (8, 64, 512)
#: Sums of random numbers cancel.
CLOSE = Tolerance(2.0**-7, 2e-2)


def _operand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _case(*args: Any) -> Case:
    op, shape, *rest = args
    return case_of(op, shape, 2, CLOSE, *rest)


def _eager(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b, out=out)


def _eager_groups(
    a: torch.Tensor, b: torch.Tensor, starts: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Groups of equal size, whatever the starts say."""
    return out.copy_(torch.bmm(a.view(len(b), -1, a.shape[1]), b.mT).view(out.shape))


def _dense(rows: int, columns: int, depth: int) -> Case:
    return _case(
        "mm_bf16",
        (1, rows, columns, depth),
        lambda: (_operand(rows, depth), _operand(columns, depth).T, output(rows, columns)),
        lambda gemm: lambda a, b, out: gemm(a, b, pdl=True, out=out),
        _eager,
        2,
    )


def _grouped(tokens: int, columns: int, depth: int) -> Iterator[Case]:
    shape, rows = (GROUPS, tokens, columns, depth), GROUPS * tokens
    yield _case(
        "bmm_bf16",
        shape,
        lambda: (
            _operand(GROUPS, tokens, depth),
            _operand(GROUPS, columns, depth).mT,
            output(GROUPS, tokens, columns),
        ),
        lambda gemm: gemm,
        _eager,
        2,
    )

    def make() -> tuple[Any, ...]:
        weights = _operand(GROUPS, columns, depth)
        return _operand(rows, depth), weights, starts(tokens), output(rows, columns)

    yield _case("grouped_mm_bf16", shape, make, lambda gemm: gemm, _eager_groups, 3)
    yield _case(
        "segment_gemm",
        shape,
        make,
        lambda gemm: lambda x, weights, starts, out: gemm(x, weights, starts, out=out),
        _eager_groups,
        3,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for columns, depth in LAYERS:
        for rows in ROWS:
            yield _dense(rows, columns, depth)
    for columns, depth in EXPERTS:
        for tokens in TOKENS:
            yield from _grouped(tokens, columns, depth)


if __name__ == "__main__":
    script(__file__)
