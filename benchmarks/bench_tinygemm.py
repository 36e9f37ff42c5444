# SPDX-License-Identifier: Apache-2.0
"""Products of few rows: the weight and the input read once, one write of the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.testing import Tolerance, poison

DTYPES = ("bf16",)
#: Columns and depth: the routers of gpt-oss-20b and 120b, DeepSeek-V3's as a layer; larger layers.
LAYERS = ((32, 2880), (128, 2880), (256, 7168), (2048, 2048), (5120, 5120))
ROWS = (1, 8, 16, 32, 64, 128)
ROUTERS = (
    ("mm_M1_16_K7168_N128", 128, torch.bfloat16),
    ("mm_M1_16_K7168_N256", 256, torch.float32),
)
#: Results near zero are sums that cancel; tensor cores add with fewer bits than float32 has.
CLOSE = {torch.bfloat16: Tolerance(2.0**-7, 5e-3), torch.float32: Tolerance(1e-4, 5e-3)}


def _bytes(rows: int, columns: int, depth: int, itemsize: int) -> int:
    return 2 * depth * (rows + columns) + itemsize * rows * columns


def _eager(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor) -> None:
    out.copy_(torch.nn.functional.linear(x, weight, bias))


# PyTorch's result is rounded to 16 bits also where ours is float32: it is about time alone.
def _eager_router(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.nn.functional.linear(x, weight))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for columns, depth in LAYERS:
        for rows in ROWS:

            def make(rows: int = rows, columns: int = columns, depth: int = depth) -> Any:
                x, weight = (
                    torch.randn(n, depth, dtype=dtype, device="cuda") for n in (rows, columns)
                )
                out = poison(torch.empty(rows, columns, dtype=dtype, device="cuda"))
                return x, weight, out, torch.randn(columns, dtype=dtype, device="cuda")

            yield Case(
                "tinygemm_bf16",
                f"[{rows}, {depth}] x [{depth}, {columns}]",
                _bytes(rows, columns, depth, 2) + 2 * columns,
                make,
                bind=lambda gemm: lambda x, weight, out, bias: gemm(x, weight, out, bias, True),
                eager=_eager,
                tolerances={2: CLOSE[torch.bfloat16]},
                flops=2 * rows * columns * depth,
            )
    for name, columns, out_dtype in ROUTERS:
        for rows in (1, 4, 8, 16):

            def make_router(
                rows: int = rows, columns: int = columns, out_dtype: torch.dtype = out_dtype
            ) -> Any:
                x, weight = (
                    torch.randn(n, 7168, dtype=dtype, device="cuda") for n in (rows, columns)
                )
                return x, weight, poison(torch.empty(rows, columns, dtype=out_dtype, device="cuda"))

            yield Case(
                name,
                f"{rows} tokens",
                _bytes(rows, columns, 7168, out_dtype.itemsize),
                make_router,
                bind=lambda route: lambda x, weight, out: route(x, weight.T, out),
                eager=_eager_router,
                tolerances={2: CLOSE[out_dtype]},
                flops=2 * rows * columns * 7168,
            )


if __name__ == "__main__":
    script(__file__)
