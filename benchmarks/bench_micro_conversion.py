# SPDX-License-Identifier: Apache-2.0
"""e4m3 to 16 bits and f32 on Hopper: in registers, and from global to shared memory.

Each result is compared with PyTorch's before it is timed. By moving bits, NaN becomes a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from _micro import POOLS, TILE_BYTES, Row, measure, pool, script

ROUNDS, TILES = 2000, 1500
WORDS = 16  # of four e4m3, of a thread
TILE = 128 * 128  # elements


class Conversion(NamedTuple):
    name: str
    dtype: torch.dtype
    factor: float = 1.0  # that the results lack


#: In the order of register_kernel() in micro/conversion.cu.
CONVERSIONS = (
    Conversion("f16", torch.float16),
    Conversion("f16 by bits, times 2^-8", torch.float16, 2.0**8),
    Conversion("f32", torch.float32),
    Conversion("bf16 by f16 and f32", torch.bfloat16),
    Conversion("bf16 by bits", torch.bfloat16),
    Conversion("bf16 by bits, times 2^-120", torch.bfloat16, 2.0**120),
)


def check(name: str, got: torch.Tensor, codes: torch.Tensor) -> None:
    want = codes.view(torch.float8_e4m3fn).float()
    wrong = int(((got != want) & ~want.isnan()).sum())
    assert wrong == 0, f"{name}: {wrong} of {want.numel()} numbers are wrong"


def in_registers() -> Iterator[Row]:
    data = pool(POOLS["L2"])
    for number, conversion in enumerate(CONVERSIONS):
        for threads in (128, 512):
            codes = data.flatten()[: WORDS * threads * 4]
            out = torch.empty(codes.numel(), dtype=conversion.dtype, device="cuda")
            found = measure("conversion_rate", data, out, number, threads, ROUNDS)
            check(conversion.name, out.float() * conversion.factor, codes)
            rate = codes.numel() * ROUNDS / float(found.clocks.mean())
            yield Row(f"to {conversion.name}, threads {threads}", {"elements/clk/SM": rate})


def unswizzled(tile: torch.Tensor) -> torch.Tensor:
    """[128, 128] of what lies in shared memory as two panels with the 128-byte swizzle."""
    chunks = tile.view(2, 128, 8, 8)  # panels, rows, 16-byte columns, elements of 16 bits
    rows = torch.arange(128, device=tile.device)[:, None]
    columns = torch.arange(8, device=tile.device)[None]
    return chunks[:, rows, columns ^ rows % 8].transpose(0, 1).reshape(128, 128)


def to_shared_memory() -> Iterator[Row]:
    for dtype in (torch.float16, torch.bfloat16):
        name = "f16" if dtype == torch.float16 else "bf16"
        for ahead in (1, 2):
            out = torch.empty(TILE_BYTES // 2, dtype=dtype, device="cuda")
            how = out, name == "f16", ahead, TILES
            only_tile = pool(TILE)
            measure("tile_conversion_rate", only_tile, *how)
            check(name, unswizzled(out).float(), only_tile.view(128, 128))
            for memory, size in POOLS.items():
                found = measure("tile_conversion_rate", pool(size), *how)
                clocks = float(found.clocks.mean()) / TILES
                figures = {
                    "elements/clk/SM": TILE / clocks,
                    "clk/tile": clocks,
                    "GB/s": TILE * TILES * len(found.clocks) / found.seconds * 1e-9,
                }
                yield Row(f"{memory} to shared memory as {name}, tiles ahead {ahead}", figures)


def rows() -> Iterator[Row]:
    yield from in_registers()
    yield from to_shared_memory()


def main(argv: Sequence[str] | None = None) -> None:
    script(__doc__ or "", rows, argv)


if __name__ == "__main__":
    main()
