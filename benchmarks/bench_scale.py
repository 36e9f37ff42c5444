# SPDX-License-Identifier: Apache-2.0
"""scale: one read and one write of every element."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _harness import Case
from _script import script

from precast.testing import poison

DTYPES = ("bf16", "f16", "f32")
# [16384, 8192] in 16 bits is 256 MiB a tensor, four times the L2 of the largest GPU. The smaller
# ones show what the start and the end of a plain stream take of its share of the ceiling.
SHAPES = ((64, 4096), (2048, 8192), (4096, 8192), (16384, 8192), (65536, 8192))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, columns in SHAPES:

        def make(shape: tuple[int, int] = (rows, columns)) -> tuple[torch.Tensor, float, object]:
            x = torch.randn(shape, dtype=dtype, device="cuda")
            return x, 1.25, poison(torch.empty_like(x))

        yield Case(
            "scale",
            f"[{rows}, {columns}]",
            2 * rows * columns * dtype.itemsize,
            make,
            bind=lambda scale: lambda x, factor, out: scale(x, factor, out),
            eager=lambda x, factor, out: x * factor,
        )


if __name__ == "__main__":
    script(__file__)
