# SPDX-License-Identifier: Apache-2.0
"""Which tile the block-scaled GEMM for sm_90a takes, and why: what a launch computes in C++.

``include/precast/gemm/sm90/choose.cuh`` decides at each call; this module says the same without a
GPU or a module, for ``precast explain``, and gives the choices the names that tuning tables have. A
test compares the two, number by number.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from precast._plan.gemm_costs import costs

#: How tokens belong to groups, and the function whose calls are meant, in the order of
#: ``TokenGroups``.
KINDS = {
    "plain": "gemm_fp8_nt_groupwise",
    "masked": "batch_deepgemm_fp8_nt_groupwise",
    "ranges": "group_gemm_fp8_nt_groupwise",
    "contiguous": "group_deepgemm_fp8_nt_groupwise",
}
#: The clock at which costs are counted, and the multiprocessors of an H200.
CLOCK_GHZ, SMS = 1.755, 132
_BLOCK = 128


class Tile(NamedTuple):
    """Rows and columns of wgmma; swapped, the rows are columns of the weight."""

    rows: int
    columns: int
    swapped: bool = False

    @property
    def tokens(self) -> int:
        return self.columns if self.swapped else self.rows

    @property
    def weights(self) -> int:
        return self.rows if self.swapped else self.columns

    @property
    def ctas_per_sm(self) -> int:
        return 2 if self.swapped and self.columns <= (128 if self.rows == 64 else 32) else 1


class Cluster(NamedTuple):
    """What the CTAs of a cluster do together."""

    use: str
    ctas: int


#: ``kFp8Tiles`` and ``kSm90Clusters``.
TILES = (
    *(Tile(128, columns) for columns in (192, 160, 128, 96, 64)),
    *(Tile(128, columns, True) for columns in (64, 32, 16)),
    *(Tile(64, columns, True) for columns in (128, 64, 32, 16)),
    Tile(256, 128),
)
CLUSTERS = (
    Cluster("none", 1),
    Cluster("shares_a", 2),
    Cluster("shares_b", 2),
    *(Cluster("splits_k", ctas) for ctas in (2, 4, 8)),
)


class Problem(NamedTuple):
    """A product: ``tokens`` are those of a group, as far as the host knows."""

    kind: str
    groups: int
    tokens: int
    columns: int
    depth: int
    sms: int = SMS


class Estimate(NamedTuple):
    """What the model expects of a choice, in clocks."""

    clocks: float
    waves: int
    #: Blocks of the depth in a tile, and what one takes: the consumers, if nothing holds them up;
    #: the tensor cores of an SM; the copies to it.
    blocks: int
    consumer: float
    multiply: float
    copy: float
    #: Of reading everything from memory once.
    read: float
    #: Of the tiles besides their blocks.
    of_tiles: float

    @property
    def limit(self) -> str:
        """What takes the longest."""
        blocks = self.waves * self.blocks
        parts = {
            "consumers": blocks * self.consumer,
            "tensor cores": blocks * self.multiply,
            "copies from L2": blocks * self.copy,
            "memory": self.read,
            "begin and end of tiles": self.of_tiles,
        }
        return max(parts, key=parts.__getitem__)

    @property
    def us(self) -> float:
        return self.clocks / CLOCK_GHZ * 1e-3


class Choice(NamedTuple):
    """A tile and a kind of cluster, by the number that launches take."""

    number: int

    @property
    def tile(self) -> Tile:
        return TILES[self.number // len(CLUSTERS)]

    @property
    def cluster(self) -> Cluster:
        return CLUSTERS[self.number % len(CLUSTERS)]

    @property
    def name(self) -> str:
        """Tokens and columns of a tile, and the cluster: ``128x192``, ``256x128+shares_a``."""
        swapped = "swapped" if self.tile.swapped else ""
        use, ctas = self.cluster
        cluster = "" if use == "none" else f"+{use}" + (f"{ctas}" if use == "splits_k" else "")
        return f"{self.tile.tokens}x{self.tile.weights}{swapped}{cluster}"

    def is_legal(self, kind: str) -> bool:
        """``is_legal()`` in C++, where the reasons are."""
        if kind == "contiguous" and self.tile.tokens > _BLOCK:
            return False
        use = self.cluster.use
        return (use != "shares_b" or kind != "contiguous") and (
            use != "splits_k" or kind == "plain"
        )

    def estimate(self, problem: Problem) -> Estimate:
        """``sm90_gemm_clocks()`` in C++, where each step is explained."""
        cost, tile, (use, ctas_of_cluster) = _costs(), self.tile, self.cluster
        shares, parts = use in ("shares_a", "shares_b"), ctas_of_cluster if use == "splits_k" else 1
        down, right = (2 if use == "shares_b" else 1), (2 if use == "shares_a" else 1)
        units = _ceil(problem.tokens, tile.tokens * down)
        units *= _ceil(problem.columns, tile.weights * right)
        ctas = float(problem.groups) * units * ctas_of_cluster
        used = {8: cost["used_by_8"][0], 4: cost["used_by_4"][0]}.get(ctas_of_cluster, 1.0)
        slots = math.floor(problem.sms * tile.ctas_per_sm * used / ctas_of_cluster)
        waves = math.ceil(ctas / ctas_of_cluster / max(1.0, slots))
        busy = min(tile.ctas_per_sm, math.ceil(ctas / problem.sms))

        wgmma = max(tile.columns / 2, (64 + tile.columns) * 32 / cost["shared_bytes"][0])
        multiply = 4 * wgmma * (tile.rows // 64)
        taken = 128.0 * (tile.tokens + tile.weights)
        half = {"shares_a": tile.tokens, "shares_b": tile.weights}.get(use, 0)
        copy = taken / cost["fill_bytes"][0] + (taken - 64.0 * half) / cost["l2_bytes"][0]
        number = self.number // len(CLUSTERS)
        consumer = cost["consumer"][number]
        block = _together(consumer, busy * max(multiply, copy))
        if shares:
            block *= 1 + cost["share"][0]

        depth, tokens, columns = float(problem.depth), problem.tokens, problem.columns
        moved = depth * tokens + depth * columns + 2.0 * tokens * columns
        missing = 1 - min(1.0, ctas / (problem.sms * tile.ctas_per_sm))
        read = problem.groups * moved / cost["dram_bytes"][0] * (1 + cost["missing"][0] * missing)
        of_tile = cost["tile"][number]
        if parts > 1:
            split = cost["split"][{2: 0, 4: 1}.get(parts, 2)]
            of_tile += split + cost["split_byte"][0] * 4.0 * tile.rows * tile.columns
        blocks = _ceil(_ceil(problem.depth, _BLOCK), parts)
        clocks = cost["start"][0] + _together(waves * blocks * block, read) + waves * of_tile
        return Estimate(
            *(clocks, waves, blocks, consumer, busy * multiply, busy * copy, read, waves * of_tile)
        )


CHOICES = tuple(map(Choice, range(len(TILES) * len(CLUSTERS))))
BY_NAME = {choice.name: choice for choice in CHOICES}


def ranking(problem: Problem) -> list[tuple[Choice, Estimate]]:
    """The legal choices, the fastest first: a launch takes the first one."""
    rows = [(c, c.estimate(problem)) for c in CHOICES if c.is_legal(problem.kind)]
    return sorted(rows, key=lambda row: row[1].clocks)


@functools.cache
def _costs() -> dict[str, list[float]]:
    return costs("fp8_gemm_sm90")


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


def _together(x: float, y: float) -> float:
    return math.sqrt(math.sqrt(x * x * x * x + y * y * y * y))
