# SPDX-License-Identifier: Apache-2.0
"""Interleaving of block scales: one read and one write of every byte."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _harness import Case
from _script import script

from precast.quantization import block_scale_interleave_reference

SHAPES = ((128, 448), (7168, 128), (131072, 448), (262144, 128))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Of bytes, whatever ``dtype`` is."""
    for rows, columns in SHAPES:

        def make(rows: int = rows, columns: int = columns) -> tuple[torch.Tensor]:
            scales = torch.randn((rows, columns), device="cuda") * 40 + 128
            return (scales.clamp(1, 255).to(torch.uint8),)

        yield Case(
            "block_scale_interleave",
            f"[{rows}, {columns}]",
            2 * rows * columns,
            make,
            bind=lambda f: lambda x: f(x),
            eager=block_scale_interleave_reference,
        )


if __name__ == "__main__":
    script(__file__)
