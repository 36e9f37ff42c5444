# SPDX-License-Identifier: Apache-2.0
"""Dequantisation: codes and scales read once, 16 or 32 bits written once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _harness import Case
from _script import script

from precast.testing import poison

GROUP = 128
SHAPES = ((64, 7168), (8192, 7168))


def _eager(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    wide = x.float().unflatten(-1, (-1, GROUP)) * scale.unsqueeze(-1)
    return wide.flatten(-2).to(out.dtype)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, columns in SHAPES:

        def make(shape: tuple[int, int] = (rows, columns)) -> tuple[torch.Tensor, ...]:
            x = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
            scale = torch.randn((shape[0], shape[1] // GROUP), device="cuda")
            return x, scale, poison(torch.empty(shape, dtype=dtype, device="cuda"))

        yield Case(
            "dequantize_fp8",
            f"[{rows}, {columns}]",
            rows * columns * (1 + dtype.itemsize) + rows * columns // GROUP * 4,
            make,
            bind=lambda fn: lambda x, scale, out: fn(x, scale, out=out),
            eager=_eager,
            dtype=dtype,
        )


if __name__ == "__main__":
    script(__file__)
