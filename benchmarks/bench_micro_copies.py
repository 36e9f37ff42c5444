# SPDX-License-Identifier: Apache-2.0
"""Copies to shared memory on Hopper: TMA in boxes and in atoms of eight rows, and cp.async.

One CTA on each SM copies tiles of 128 rows of 256 bytes, which are K or V of 128 tokens and a head
dimension of 128, from random places of a pool. Four tiles are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from _micro import POOLS, TILE_BYTES, Row, measure, pool, script, sms

TILES = 1500  # of a CTA
#: Rows of a copy, and the warps that issue copies: one lane a box or atom, all lanes for cp.async.
CASES = {
    "boxes of 128 rows": (128, (1,)),
    "atoms of 8 rows": (8, (1, 2, 4)),
    "rows by cp.async": (1, (1, 2, 4)),
}


def rows() -> Iterator[Row]:
    for memory, size in POOLS.items():
        for name, (box_rows, counts) in CASES.items():
            for warps in counts:
                found = measure("copy_rate", pool(size), box_rows, warps, TILES)
                clocks = float(found.clocks.mean()) / TILES
                figures = {
                    "clk/tile": clocks,
                    "B/clk/SM": TILE_BYTES / clocks,
                    "GB/s": TILE_BYTES * TILES * sms() / found.seconds * 1e-9,
                    "MHz": found.megahertz,
                }
                yield Row(f"{memory}, {name}, warps {warps}", figures)


def main(argv: Sequence[str] | None = None) -> None:
    script(__doc__ or "", rows, argv)


if __name__ == "__main__":
    main()
