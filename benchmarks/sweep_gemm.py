#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time the tiles and kinds of clusters of a GEMM for Hopper, for fit_gemm.py.

    python benchmarks/sweep_gemm.py --op OP --json FILE [--shape M,N,K ...] [--choice NUMBER ...]

OP is fp8_gemm_sm90, gemm_sm90 or scaled_gemm_sm90.

Without --shape, these are weights of several models with numbers of tokens from 1 to 8192. Each
choice is timed in a CUDA graph of calls on several copies of the arguments, which together exceed
the L2 cache. Choices that read far more than others are left out, and one that is much slower than
the best so far, in its first replay, gets no more of them. FILE gets a row for each shape: `m`,
`n`, `k`, and `us`, the shortest time of each choice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from precast._ops.gemm.fp8_gemm import _GEMM_SM90
from precast._ops.gemm.mm_bf16 import _MM_SM90
from precast._ops.gemm.scaled_mm import _SCALED_MM_SM90

#: Columns and depth of weights.
WEIGHTS = (
    (7168, 2048), (4096, 7168), (2112, 7168), (24576, 1536), (7168, 16384), (1536, 7168),
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (5120, 3072),
    (3072, 1536), (32768, 512), (7168, 1024), (2048, 2048), (18432, 7168), (1024, 8192),
)  # fmt: skip
ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
#: Replays of a choice, and times the best so far that a first replay may take.
REPLAYS, HOPELESS = 4, 1.6
L2_BYTES = 200_000_000
#: Choices that read so many times what the least one does are left out.
MOST_READ = 3.0
_FOLDER = Path(__file__).resolve().parents[1] / "include/precast/gemm/sm90"
#: What each kind of cluster does, and its CTAs.
CLUSTERS = [
    (use, int(ctas))
    for use, ctas in re.findall(
        r"\{ClusterUse::(\w+), (\d)\}", (_FOLDER / "choose.cuh").read_text()
    )
]
_Arguments = tuple[Any, ...]


class Family(NamedTuple):
    header: str  # has the tiles
    arguments: Callable[[int, int, int], _Arguments]
    launch: Callable[..., None]  # takes the arguments and a choice
    element_bytes: int

    def tiles(self) -> list[tuple[int, int]]:
        """Tokens and columns of each tile."""
        text = (_FOLDER / self.header).read_text()
        found = re.findall(r"\{(\d+), (\d+), (true|false)(?:, \d)?\}", text)
        return [
            (int(columns), int(rows)) if swapped == "true" else (int(rows), int(columns))
            for rows, columns, swapped in found
        ]


def _codes(rows: int, depth: int) -> torch.Tensor:
    values = torch.randint(0, 120, (rows, depth), dtype=torch.uint8, device="cuda")
    return values.view(torch.float8_e4m3fn)


def _fp8_arguments(m: int, n: int, k: int) -> _Arguments:
    blocks = -(-k // 128)
    return (
        _codes(m, k),
        _codes(n, k),
        torch.rand(blocks, -(-m // 4) * 4, device="cuda")[:, :m].T,
        torch.rand(-(-n // 128), blocks, device="cuda"),
        torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
    )


def _arguments(m: int, n: int, k: int) -> _Arguments:
    a, weight = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    return a, weight.T, torch.empty(m, n, dtype=torch.bfloat16, device="cuda")


def _scaled_arguments(m: int, n: int, k: int) -> _Arguments:
    """With a scale for each row, as engines quantise."""
    scales = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    return _codes(m, k), _codes(n, k).T, *scales, out


FAMILIES = {
    "fp8_gemm_sm90": Family(
        "choose.cuh",
        _fp8_arguments,
        lambda *given: _GEMM_SM90.launch(*given[:5], True, True, 1, given[5]),
        1,
    ),
    "gemm_sm90": Family(
        "gemm16_choose.cuh",
        _arguments,
        lambda a, b, out, choice: _MM_SM90.launch(a, b, None, out, choice, True),
        2,
    ),
    "scaled_gemm_sm90": Family(
        "scaled_choose.cuh",
        _scaled_arguments,
        lambda *given: _SCALED_MM_SM90.launch(*given[:5], None, given[5]),
        1,
    ),
}


def read(tile: tuple[int, int], cluster: tuple[str, int], m: int, n: int, k: int, sms: int) -> int:
    """About how much the busiest CTA copies to shared memory; latency counts as 64 rows.

    `k` is counted in bytes.
    """
    (tokens, columns), (use, ctas) = tile, cluster
    down, right = (2 if use == "shares_b" else 1), (2 if use == "shares_a" else 1)
    units = math.ceil(m / (tokens * down)) * math.ceil(n / (columns * right))
    parts = ctas if use == "splits_k" else 1
    blocks = math.ceil(k / 128 / parts) + 4
    return math.ceil(units / (sms // ctas)) * blocks * (tokens + columns + 64)


def replay(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds of a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls * 1e3


def sweep_shape(
    family: Family, m: int, n: int, k: int, choices: Sequence[int] = ()
) -> dict[str, Any]:
    tiles, depth = family.tiles(), family.element_bytes * k
    choices = choices or range(len(tiles) * len(CLUSTERS))
    count = max(2, L2_BYTES // (depth * (m + n)))
    copies = [family.arguments(m, n, k) for _ in range(count)]
    us: dict[int, float] = {}
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    reads = {
        choice: read(
            tiles[choice // len(CLUSTERS)], CLUSTERS[choice % len(CLUSTERS)], m, n, depth, sms
        )
        for choice in choices
    }
    choices = [c for c in choices if reads[c] <= MOST_READ * min(reads.values())]
    # In a random order, because clocks change.
    for choice in random.sample(choices, len(choices)):
        family.launch(*copies[0], choice)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for copy in copies:
                family.launch(*copy, choice)
        replay(graph, len(copies))
        us[choice] = replay(graph, len(copies))
        if us[choice] < HOPELESS * min(us.values()):
            us[choice] = min(us[choice], *(replay(graph, len(copies)) for _ in range(REPLAYS - 1)))
    return {"m": m, "n": n, "k": k, "us": {str(c): round(us[c], 3) for c in sorted(us)}}


def parse_shape(text: str) -> tuple[int, int, int]:
    m, n, k = map(int, text.split(","))
    return m, n, k


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=FAMILIES, required=True)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--shape", type=parse_shape, action="append", metavar="M,N,K")
    parser.add_argument("--choice", type=int, action="append", metavar="NUMBER")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    args = parser.parse_args()
    shapes = args.shape or [(m, n, k) for m, (n, k) in itertools.product(ROWS, WEIGHTS)]
    if not args.shape:
        random.shuffle(shapes)
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for m, n, k in shapes:
        if time.monotonic() - begin > args.seconds:
            print(f"stopped after {len(rows)} of {len(shapes)} shapes")
            break
        rows.append(sweep_shape(FAMILIES[args.op], m, n, k, args.choice or ()))
        us = rows[-1]["us"]
        best = sorted(us, key=us.__getitem__)[:5]
        print(
            f"{m:5d} {n:5d} {k:5d} {2e-6 * m * n * k / us[best[0]]:7.1f} TFLOP/s  "
            + "  ".join(f"{c}: {us[c]:.2f}" for c in best),
            flush=True,
        )
        args.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
