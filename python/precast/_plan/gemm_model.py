# SPDX-License-Identifier: Apache-2.0
"""Which tile a GEMM for sm_90a takes, and why: what a launch computes in C++.

``include/precast/gemm/sm90/choose.cuh`` decides at each call; this module says the same without a
GPU or a module, for ``precast explain``, and gives the choices the names that tuning tables have. A
test compares the two, number by number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from precast._plan.gemm_costs import OPS, costs

#: The clock at which costs are counted, and the multiprocessors of an H200.
CLOCK_GHZ, SMS = 1.755, 132
#: The most tokens of one product that has costs of its own.
FEW_TOKENS = 128


class Tile(NamedTuple):
    """Rows and columns of wgmma; swapped, the rows are columns of the weight."""

    rows: int
    columns: int
    swapped: bool = False
    #: That fit on an SM; 0: as ``usual_ctas`` says.
    ctas: int = 0

    @property
    def tokens(self) -> int:
        return self.columns if self.swapped else self.rows

    @property
    def weights(self) -> int:
        return self.rows if self.swapped else self.columns

    @property
    def usual_ctas(self) -> int:
        return 2 if self.swapped and self.columns <= (128 if self.rows == 64 else 32) else 1

    @property
    def ctas_per_sm(self) -> int:
        return self.ctas or self.usual_ctas

    @property
    def name(self) -> str:
        """Tokens and columns of the weight, and CTAs of an SM if they are not the usual ones."""
        ctas = f"@{self.ctas}" if self.ctas_per_sm != self.usual_ctas else ""
        return f"{self.tokens}x{self.weights}{'swapped' if self.swapped else ''}{ctas}"


class Cluster(NamedTuple):
    """What the CTAs of a cluster do together."""

    use: str
    ctas: int


#: ``kSm90Clusters``.
CLUSTERS = (
    Cluster("none", 1),
    Cluster("shares_a", 2),
    Cluster("shares_b", 2),
    *(Cluster("splits_k", ctas) for ctas in (2, 4, 8)),
)


class Family(NamedTuple):
    """The GEMMs of one op: their tiles, and what their model counts."""

    op: str
    element_bytes: int
    tiles: tuple[Tile, ...]
    #: The functions that take them, by how tokens belong to groups; the first one is meant.
    functions: Mapping[str, tuple[str, ...]]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.functions)

    @property
    def few_op(self) -> str:
        """What the costs of few tokens are called: ``FewCosts`` in C++."""
        few = f"{self.op}_few"
        return few if few in OPS else self.op


#: By what the operands are: the lists of tiles in ``choose.cuh`` and beside it.
FAMILIES = {
    "fp8_block": Family(
        "fp8_gemm_sm90",
        1,
        (
            *(Tile(128, columns) for columns in (192, 160, 128, 96, 64)),
            *(Tile(64, columns) for columns in (128, 96, 64, 32)),
            Tile(128, 16, True),
            *(Tile(64, columns, True) for columns in (64, 32, 16)),
            Tile(256, 128),
        ),
        {
            "plain": ("gemm_fp8_nt_groupwise",),
            "masked": ("batch_deepgemm_fp8_nt_groupwise",),
            "ranges": ("group_gemm_fp8_nt_groupwise",),
            "contiguous": ("group_deepgemm_fp8_nt_groupwise",),
        },
    ),
    "fp8_row": Family(
        "scaled_gemm_sm90",
        1,
        (
            *(Tile(128, columns) for columns in (192, 128, 64)),
            Tile(128, 64, True, 1),
            Tile(256, 128),
            *(Tile(64, columns, True, 2) for columns in (64, 32, 16)),
            Tile(64, 16, True, 3),
            *(Tile(64, columns) for columns in (64, 96, 128, 80)),
            Tile(64, 48, ctas=2),
            Tile(128, 160),
            Tile(128, 176),
        ),
        {
            "plain": ("scaled_mm", "mm_fp8"),
            "batched": ("bmm_fp8",),
            "ranges": ("grouped_mm_fp8",),
        },
    ),
    "bf16": Family(
        "gemm_sm90",
        2,
        (
            *(Tile(128, columns) for columns in (256, 192, 128)),
            Tile(128, 64, True, 1),
            Tile(64, 128),
            *(Tile(64, columns, True, 2) for columns in (64, 32, 16)),
            Tile(64, 16, True, 3),
            Tile(64, 64),
            Tile(64, 192),
            Tile(128, 64),
            Tile(64, 80),
            Tile(64, 48, ctas=2),
            Tile(128, 160),
            Tile(128, 176),
        ),
        {
            "plain": ("mm_bf16",),
            "batched": ("bmm_bf16",),
            "ranges": ("grouped_mm_bf16",),
        },
    ),
}
#: The operands that are meant where nothing else is said.
OPERANDS = "fp8_block"


class Problem(NamedTuple):
    """A product: ``tokens`` are those of a group, as far as the host knows."""

    kind: str
    groups: int
    tokens: int
    columns: int
    depth: int
    sms: int = SMS

    @property
    def is_few(self) -> bool:
        """Whether its costs are those of few tokens."""
        return self.kind in ("plain", "batched") and self.groups == 1 and self.tokens <= FEW_TOKENS


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
    operands: str = OPERANDS

    @property
    def family(self) -> Family:
        return FAMILIES[self.operands]

    @property
    def tile(self) -> Tile:
        return self.family.tiles[self.number // len(CLUSTERS)]

    @property
    def cluster(self) -> Cluster:
        return CLUSTERS[self.number % len(CLUSTERS)]

    @property
    def name(self) -> str:
        """Tokens and columns of a tile, and the cluster: ``128x192``, ``256x128+shares_a``."""
        use, ctas = self.cluster
        cluster = "" if use == "none" else f"+{use}" + (f"{ctas}" if use == "splits_k" else "")
        return self.tile.name + cluster

    def is_legal(self, kind: str) -> bool:
        """``is_legal()`` in C++, where the reasons are."""
        if kind == "contiguous" and self.tile.tokens > 128:
            return False
        use = self.cluster.use
        return (use != "shares_b" or kind != "contiguous") and (
            use != "splits_k" or kind in ("plain", "batched")
        )

    def estimate(self, problem: Problem) -> Estimate:
        """``sm90_gemm_clocks()`` in C++, where each step is explained."""
        family = self.family
        cost = costs_of(family.few_op if problem.is_few else family.op)
        tile, (use, ctas_of_cluster) = self.tile, self.cluster
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
        rows, weights = min(tile.tokens, problem.tokens), min(tile.weights, problem.columns)
        taken = 128.0 * (rows + weights)
        half = {"shares_a": rows, "shares_b": weights}.get(use, 0)
        copy = taken / cost["fill_bytes"][0] + (taken - 64.0 * half) / cost["l2_bytes"][0]
        number = self.number // len(CLUSTERS)
        consumer = cost["consumer"][number]
        block = _together(consumer, busy * _together(multiply, copy))
        if shares:
            block *= 1 + cost["share"][0]

        depth, tokens, columns = float(problem.depth), problem.tokens, problem.columns
        moved = family.element_bytes * depth * (float(tokens) + columns) + 2.0 * tokens * columns
        missing = 1 - min(1.0, ctas / (problem.sms * tile.ctas_per_sm))
        read = problem.groups * moved / cost["dram_bytes"][0] * (1 + cost["missing"][0] * missing)
        of_tile = cost["tile"][number] + (cost["pair"][0] if shares else 0.0)
        if parts > 1:
            split = cost["split"][{2: 0, 4: 1}.get(parts, 2)]
            of_tile += split + cost["split_byte"][0] * 4.0 * tile.rows * tile.columns
        blocks = _ceil(_ceil(problem.depth, 128 // family.element_bytes), parts)
        clocks = cost["start"][0] + _together(waves * blocks * block, read) + waves * of_tile
        return Estimate(
            *(clocks, waves, blocks, consumer, busy * multiply, busy * copy, read, waves * of_tile)
        )


def choices(operands: str = OPERANDS) -> tuple[Choice, ...]:
    """All choices of a family, by their numbers."""
    count = len(FAMILIES[operands].tiles) * len(CLUSTERS)
    return tuple(Choice(number, operands) for number in range(count))


@functools.cache
def by_name(operands: str = OPERANDS) -> Mapping[str, Choice]:
    """The choices of a family by their names."""
    return {choice.name: choice for choice in choices(operands)}


def ranking(problem: Problem, operands: str = OPERANDS) -> list[tuple[Choice, Estimate]]:
    """The legal choices, the fastest first: a launch takes the first one."""
    rows = [(c, c.estimate(problem)) for c in choices(operands) if c.is_legal(problem.kind)]
    return sorted(rows, key=lambda row: row[1].clocks)


costs_of = functools.cache(costs)


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


def _together(x: float, y: float) -> float:
    return math.sqrt(math.sqrt(x * x * x * x + y * y * y * y))
