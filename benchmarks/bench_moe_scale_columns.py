# SPDX-License-Identifier: Apache-2.0
"""Columns multiplied by scales and rounded to e4m3: tokens, and rows behind the activation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _experts import GPT_OSS, TOKENS, numbers
from _harness import Case
from _script import script

from precast.fused_moe import moe_scale_columns_reference
from precast.testing import poison

DTYPES = ("bf16",)


def _case(rows: int, columns: int) -> Case:
    def make() -> tuple[Any, ...]:
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return numbers(rows, columns), numbers(columns), poison(out)

    def eager(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(moe_scale_columns_reference(x, scale))

    return Case(
        "moe_scale_columns",
        f"[{rows}, {columns}]",
        2 * columns * (2 * rows + 1),
        make,
        bind=lambda f: lambda x, scale, out: f(x, scale, out=out),
        eager=eager,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in TOKENS:
        yield _case(tokens, GPT_OSS.hidden)
        yield _case(tokens * GPT_OSS.topk, GPT_OSS.inter)


if __name__ == "__main__":
    script(__file__)
