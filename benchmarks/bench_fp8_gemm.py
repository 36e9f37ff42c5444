# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 matrices with scales of blocks, beside DeepGEMM's and cuBLAS's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast._ops.quantize.per_block import per_block_cast_to_fp8_reference
from precast._ops.quantize.per_token_group import per_token_cast_to_fp8_reference
from precast.testing import Tolerance, poison

DTYPES = ("bf16",)
#: Columns and depth of the linear layers of DeepSeek-V3, whose weights are in this format.
LAYERS = ((7168, 2048), (4096, 7168), (2112, 7168), (24576, 1536), (7168, 16384))
ROWS = (1, 16, 64, 128, 512, 4096)
#: Sums of random numbers cancel, and tensor cores add the products of a block with about 14 bits.
CLOSE = Tolerance(2.0**-7, 0.1)


def _eager(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    each = b_scale.repeat_interleave(128, 0)[: b.shape[0]].repeat_interleave(128, 1)
    x = a.float() * a_scale.repeat_interleave(128, 1)
    out.copy_(x @ (b.float() * each).T)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for columns, depth in LAYERS:
        for rows in ROWS:

            def make(rows: int = rows, columns: int = columns, depth: int = depth) -> Any:
                x, weight = (
                    torch.randn(n, depth, dtype=dtype, device="cuda") for n in (rows, columns)
                )
                a, a_scale = per_token_cast_to_fp8_reference(x, use_ue8m0=False)
                b, b_scale = per_block_cast_to_fp8_reference(weight, use_ue8m0=False)
                # DeepGEMM takes scales of this layout as they are.
                room = a_scale.new_zeros(a_scale.shape[1], -(-rows // 4) * 4)
                a_scale = room[:, :rows].copy_(a_scale.T).T
                out = poison(torch.empty(rows, columns, dtype=dtype, device="cuda"))
                return a, b, a_scale, b_scale, out

            yield Case(
                "gemm_fp8_nt_groupwise",
                f"[{rows}, {depth}] x [{depth}, {columns}]",
                depth * (rows + columns) + dtype.itemsize * rows * columns,
                make,
                bind=lambda gemm: (
                    lambda a, b, a_scale, b_scale, out: gemm(a, b, a_scale, b_scale, "K", out=out)
                ),
                eager=_eager,
                tolerances={4: CLOSE},
                close=CLOSE,
                flops=2 * rows * columns * depth,
            )


if __name__ == "__main__":
    script(__file__)
