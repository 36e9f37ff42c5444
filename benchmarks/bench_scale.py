# SPDX-License-Identifier: Apache-2.0
"""scale: one read and one write of every element."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _harness import DTYPES, Case, arguments, run

import precast
from precast.testing import poison

# [16384, 8192] in 16 bits is 256 MiB a tensor, four times the L2 of the largest GPU.
SHAPES = ((64, 4096), (16384, 8192), (65536, 8192))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, columns in SHAPES:

        def make(shape: tuple[int, int] = (rows, columns)) -> tuple[torch.Tensor, float, object]:
            x = torch.randn(shape, dtype=dtype, device="cuda")
            return x, 1.25, poison(torch.empty_like(x))

        moved = 2 * rows * columns * dtype.itemsize
        yield Case(
            "scale", f"[{rows}, {columns}]", moved, make, lambda x, f, out: precast.scale(x, f, out)
        )


if __name__ == "__main__":
    options = arguments(__doc__, ("bf16", "f16", "f32"))
    run(cases(DTYPES[options.dtype]), options)
