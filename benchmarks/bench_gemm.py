# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 and FP8 matrices, alone, in batches and in groups, beside cuBLAS's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.testing import Tolerance, poison

DTYPES = ("bf16",)
#: Columns and depth: layers of Llama-3 8B and 70B, a head of few columns, cubes.
LAYERS = ((6144, 4096), (4096, 14336), (10240, 8192), (2112, 7168), (4096, 4096), (8192, 8192))
ROWS = (1, 16, 64, 512, 4096)
#: Experts of a GPU: columns, depth, and rows of each.
EXPERTS = ((4096, 7168), (1536, 2048))
GROUPS = 8
TOKENS = (8, 64, 512)
E4M3 = torch.float8_e4m3fn
#: Sums of random numbers cancel, and tensor cores add FP8 products with about 14 bits.
CLOSE = {torch.bfloat16: Tolerance(2.0**-7, 2e-2), E4M3: Tolerance(2.0**-7, 0.5)}


def _operand(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype)


def _bytes(dtype: torch.dtype, read: int, written: int) -> int:
    return dtype.itemsize * read + 2 * written


def _eager_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out=out)


def _eager_fp8(
    a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    torch._scaled_mm(a[0], b[0], scale, scale, out_dtype=out.dtype, out=out[0])
    return out


def _eager_grouped(
    a: torch.Tensor, b: torch.Tensor, starts: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(torch._grouped_mm(a, b.mT, offs=starts[1:]))


def _dense(rows: int, columns: int, depth: int) -> Iterator[Case]:
    shape, flops = f"[{rows}, {depth}] x [{depth}, {columns}]", 2 * rows * columns * depth

    def make(dtype: torch.dtype) -> Any:
        a, weight = _operand(dtype, rows, depth), _operand(dtype, columns, depth)
        return a, weight.T, poison(torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda"))

    def make_fp8() -> Any:
        a, b, out = make(E4M3)
        return a[None], b[None], torch.ones((), device="cuda"), out[None]

    yield Case(
        "mm_bf16",
        shape,
        _bytes(torch.bfloat16, depth * (rows + columns), rows * columns),
        lambda: make(torch.bfloat16),
        bind=lambda gemm: lambda a, b, out: gemm(a, b, pdl=True, out=out),
        eager=_eager_mm,
        tolerances={2: CLOSE[torch.bfloat16]},
        close=CLOSE[torch.bfloat16],
        flops=flops,
    )
    yield Case(
        "bmm_fp8",
        shape,
        _bytes(E4M3, depth * (rows + columns), rows * columns),
        make_fp8,
        bind=lambda gemm: lambda a, b, scale, out: gemm(a, b, scale, scale, out.dtype, out),
        eager=_eager_fp8,
        tolerances={3: CLOSE[E4M3]},
        close=CLOSE[E4M3],
        flops=flops,
    )


def _grouped(tokens: int, columns: int, depth: int) -> Case:
    rows = GROUPS * tokens

    def make() -> Any:
        a, b = (
            _operand(torch.bfloat16, rows, depth),
            _operand(torch.bfloat16, GROUPS, columns, depth),
        )
        starts = torch.arange(GROUPS + 1, dtype=torch.int32, device="cuda") * tokens
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return a, b, starts, poison(out)

    return Case(
        "grouped_mm_bf16",
        f"{GROUPS} x [{tokens}, {depth}] x [{depth}, {columns}]",
        _bytes(torch.bfloat16, depth * (rows + GROUPS * columns), rows * columns),
        make,
        bind=lambda gemm: gemm,
        eager=_eager_grouped,
        tolerances={3: CLOSE[torch.bfloat16]},
        close=CLOSE[torch.bfloat16],
        flops=2 * rows * columns * depth,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for columns, depth in LAYERS:
        for rows in ROWS:
            yield from _dense(rows, columns, depth)
    for columns, depth in EXPERTS:
        for tokens in TOKENS:
            yield _grouped(tokens, columns, depth)


if __name__ == "__main__":
    script(__file__)
