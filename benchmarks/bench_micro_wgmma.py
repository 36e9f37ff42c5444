# SPDX-License-Identifier: Apache-2.0
"""wgmma on Hopper: its rate alone, beside TMA copies, and beside another warpgroup's exponentials.

An instruction of N columns takes at least N / 2 clocks of the tensor cores, whatever the element
type. Several warpgroups share them. `new` is a D of four instructions that is then added to another
accumulator, as long sums of FP8 need it. `hidden` is the share of the shorter of two works that
takes no time beside the longer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from _micro import POOLS, Row, measure, pool, script, sms

from precast._plan import wgmma

TYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
STEPS = 4  # instructions of a round
WARPGROUPS = 3  # at most; with more than 128 columns, two
CLOCKS = 1_000_000  # of a launch, about
#: Clocks from one copy of 32 KB to the next: attention of d128 needs one in 1200.
FILLS = {"": -1, ", copies of 27 B/clk": 1200, ", copies unpaced": 0}


def rate(name: str, how: str, form: str, columns: int, warpgroups: int, fill: str) -> Row:
    depth = wgmma.DEPTH[name]
    rounds = CLOCKS // (STEPS * warpgroups * max(columns // 2, 16))
    found = measure(
        "wgmma_rate",
        pool(POOLS["L2"], TYPES[name]),
        columns,
        how == "new",
        form == "rs",
        warpgroups,
        rounds,
        FILLS[fill],
        roles=WARPGROUPS + 2,
    )
    count = rounds * STEPS * warpgroups
    clocks = float(found.clocks[:, :warpgroups].amax(1).mean()) / count
    flops = 2 * 64 * columns * depth * count * sms()
    figures = {
        "clk/wgmma": clocks,
        "of peak": columns / 2 / clocks,
        "TFLOP/s": flops / found.seconds * 1e-12,
        "MHz": float(found.clocks[:, :warpgroups].amax(1).mean()) / found.seconds * 1e-6,
    }
    if fill:
        taken, tiles = found.clocks[:, WARPGROUPS:].mean(0)
        figures["fill B/clk/SM"] = float(tiles / taken) * 128 * 256
    shape = f"{name} m64n{columns}k{depth} {form.upper()}{' new' if how == 'new' else ''}"
    return Row(f"{shape}, warpgroups {warpgroups}{fill}", figures)


def rates() -> Iterator[Row]:
    for name in TYPES:
        for form in ("ss", "rs"):
            for warpgroups in (1, 2, 3):
                for fill in FILLS:
                    yield rate(name, "add", form, 128, warpgroups, fill)
    for (how, form), row in wgmma.COLUMNS["e4m3"].items():
        for columns in row:
            if how != "either" and (how, columns) != ("add", 128):
                yield rate("e4m3", how, form, columns, 2, "")


def overlaps() -> Iterator[Row]:
    """A round of four instructions of 64 clocks, and one of 128 * 32 exponentials, 16 a clock."""
    rounds = CLOCKS // 256
    data = pool(POOLS["L2"], torch.bfloat16)
    for form in ("ss", "rs"):
        for work in ("exp2", "softmax"):

            def clocks(mma: int, other: int, how: tuple[bool, ...]) -> torch.Tensor:
                found = measure("wgmma_beside_exp", data, *how, mma, other, roles=2)
                return found.clocks.mean(0) / rounds

            how = (form == "rs", work == "softmax")
            mma_alone = float(clocks(rounds, 0, how)[0])
            other_alone = float(clocks(0, rounds, how)[1])
            mma, other = map(float, clocks(rounds, rounds, how))
            saved = mma_alone + other_alone - max(mma, other)
            figures = {
                "wgmma clk": mma_alone,
                "other clk": other_alone,
                "wgmma beside": mma,
                "other beside": other,
                "hidden": saved / min(mma_alone, other_alone),
            }
            yield Row(f"bf16 m64n128k16 {form.upper()} and {work}", figures)


def rows() -> Iterator[Row]:
    yield from rates()
    yield from overlaps()


def main(argv: Sequence[str] | None = None) -> None:
    script(__doc__ or "", rows, argv)


if __name__ == "__main__":
    main()
