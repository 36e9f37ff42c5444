# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of a paged NVFP4 cache: 4 bits and a scale a block read once, 16 bits written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.quantization import nvfp4_kv_dequantize_paged_reference
from precast.testing import poison

DTYPES = ("bf16", "f16")
HEADS, DIM, PAGE = 8, 128, 16
#: Requests and tokens of each.
SHAPES = ((1, 128), (16, 512), (4, 4096), (16, 8192))


def _arguments(batch: int, length: int, dtype: torch.dtype) -> tuple[Any, ...]:
    each = -(-length // PAGE)
    pages = batch * each
    inner = (pages, 2, PAGE, HEADS)
    codes = (torch.randn(*inner, DIM // 2, device="cuda") * 40 + 128).clamp(0, 255).byte()
    scales = torch.randn(*inner, DIM // 16, device="cuda").abs().to(torch.float8_e4m3fn)
    table = torch.randperm(pages, device=codes.device).int().view(batch, each)
    lens = torch.full((batch,), length, dtype=torch.int32, device=codes.device)
    numbers = torch.randn(1, device="cuda").abs(), torch.randn(1, device="cuda").abs()
    shape = (batch, length, HEADS, DIM)
    outputs = (poison(torch.empty(shape, dtype=dtype, device="cuda")) for _ in range(2))
    return codes, scales, table, lens, *numbers, *outputs


def _eager(*args: Any) -> Any:
    keys, values = nvfp4_kv_dequantize_paged_reference(*args)
    args[6].copy_(keys)
    args[7].copy_(values)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for batch, length in SHAPES:

        def make(batch: int = batch, length: int = length) -> tuple[Any, ...]:
            return _arguments(batch, length, dtype)

        numbers = 2 * batch * length * HEADS * DIM
        yield Case(
            "nvfp4_kv_dequantize_paged",
            f"{batch} x {length} tokens of {HEADS} x {DIM}",
            numbers // 2 + numbers // 16 + 2 * numbers,
            make,
            bind=lambda f: lambda *args: f(*args),
            eager=_eager,
        )


if __name__ == "__main__":
    script(__file__)
