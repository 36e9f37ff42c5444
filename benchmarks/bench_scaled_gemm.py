# SPDX-License-Identifier: Apache-2.0
"""Products of FP8 matrices with one scale each, alone, in batches and in groups."""

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
E4M3 = torch.float8_e4m3fn
#: Sums of random numbers cancel, and tensor cores add FP8 products with about 14 bits.
CLOSE = Tolerance(2.0**-7, 0.5)


def _operand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(E4M3)


def _case(*args: Any) -> Case:
    op, shape, *rest = args
    return case_of(op, shape, 1, CLOSE, *rest)


def _scale() -> torch.Tensor:
    return torch.empty((), device="cuda").fill_(0.5)


def _eager(
    a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(torch._scaled_mm(a, b, scale, scale, out_dtype=out.dtype))


def _eager_batch(
    a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(torch.bmm(a.bfloat16(), b.bfloat16()) * (scale * scale))


def _eager_weight(
    a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(torch._scaled_mm(a, b.T, alpha, alpha / alpha, out_dtype=out.dtype))


def _eager_groups(
    a: torch.Tensor, b: torch.Tensor, starts: torch.Tensor, alpha: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Groups of equal size, whatever the starts say."""
    product = torch.bmm(a.bfloat16().view(len(b), -1, a.shape[1]), b.bfloat16().mT)
    return out.copy_((product * alpha).view(out.shape))


def _dense(rows: int, columns: int, depth: int) -> Iterator[Case]:
    shape = 1, rows, columns, depth
    yield _case(
        "scaled_mm",
        shape,
        lambda: (
            _operand(rows, depth),
            _operand(columns, depth).T,
            _scale(),
            output(rows, columns),
        ),
        lambda gemm: lambda a, b, scale, out: gemm(a, b, scale, scale, out=out),
        _eager,
        3,
    )
    yield _case(
        "mm_fp8",
        shape,
        lambda: (_operand(rows, depth), _operand(columns, depth), _scale(), output(rows, columns)),
        lambda gemm: lambda a, b, alpha, out: gemm(a, b, alpha, out=out, backend="cublas"),
        _eager_weight,
        3,
    )


def _grouped(tokens: int, columns: int, depth: int) -> Iterator[Case]:
    shape, rows = (GROUPS, tokens, columns, depth), GROUPS * tokens
    yield _case(
        "bmm_fp8",
        shape,
        lambda: (
            _operand(GROUPS, tokens, depth),
            _operand(GROUPS, columns, depth).mT,
            _scale(),
            output(GROUPS, tokens, columns),
        ),
        lambda gemm: lambda a, b, scale, out: gemm(a, b, scale, scale, out.dtype, out),
        _eager_batch,
        3,
    )
    yield _case(
        "grouped_mm_fp8",
        shape,
        lambda: (
            _operand(rows, depth),
            _operand(GROUPS, columns, depth),
            starts(tokens),
            _scale().view(1),
            output(rows, columns),
        ),
        lambda gemm: gemm,
        _eager_groups,
        4,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for columns, depth in LAYERS:
        for rows in ROWS:
            yield from _dense(rows, columns, depth)
    for columns, depth in EXPERTS:
        for tokens in TOKENS:
            yield from _grouped(tokens, columns, depth)


if __name__ == "__main__":
    script(__file__)
