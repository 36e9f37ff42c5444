# SPDX-License-Identifier: Apache-2.0
"""Packing of booleans: each reads a byte and writes a bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _harness import Case
from _script import script

from precast.quantization import packbits_reference, segment_packbits_reference

SIZES = (4096, 1 << 20, 1 << 28)
SEGMENTS = ((4, 1000), (64, 8192), (64, 1000 * 4001))  # how many, and the length of each


def _bits(count: int) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float16, device="cuda") > 0


def _segments_eager(
    indptr: torch.Tensor, x: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    y, new_indptr = segment_packbits_reference(x, indptr, "little")
    out[: y.shape[0]] = y
    return out, new_indptr


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Of truth values, whatever ``dtype`` is."""
    for size in SIZES:

        def make(size: int = size) -> tuple[torch.Tensor]:
            return (_bits(size),)

        yield Case(
            "packbits",
            f"[{size}]",
            size + size // 8,
            make,
            bind=lambda f: lambda x: f(x, "little"),
            eager=lambda x: packbits_reference(x, "little"),
        )
    for count, length in SEGMENTS:

        def make_segments(count: int = count, length: int = length) -> tuple[torch.Tensor, ...]:
            x = _bits(count * length)
            # Starts that are no multiples of 8, but of masks.
            starts = torch.empty(count + 1, dtype=torch.int32, device="cuda")
            starts[:] = torch.arange(count + 1, dtype=torch.int32) * length
            out = torch.empty(count * ((length + 7) // 8), dtype=torch.uint8, device="cuda")
            return starts, x, out.zero_()

        yield Case(
            "segment_packbits",
            f"{count} x [{length}]",
            count * (length + (length + 7) // 8),
            make_segments,
            bind=lambda f: lambda starts, x, out: f(x, starts, "little", out),
            eager=_segments_eager,
        )


if __name__ == "__main__":
    script(__file__)
