#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time the tiles and kinds of clusters of the block-scaled GEMM for Hopper, for fit_fp8_gemm.py.

    python benchmarks/sweep_fp8_gemm.py --json FILE [--shape M,N,K ...] [--choice NUMBER ...]

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from precast._ops.gemm._fp8 import CHOICES
from precast._ops.gemm.fp8_gemm import _GEMM_SM90

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
_HEADER = Path(__file__).resolve().parents[1] / "include/precast/gemm/sm90/choose.cuh"
_TEXT = _HEADER.read_text()
#: Tokens and columns of each tile; what each kind of cluster does, and its CTAs.
TILES = [
    (int(columns), int(rows)) if swapped == "true" else (int(rows), int(columns))
    for rows, columns, swapped in re.findall(r"\{(\d+), (\d+), (true|false)\}", _TEXT)
]
CLUSTERS = [(use, int(ctas)) for use, ctas in re.findall(r"\{ClusterUse::(\w+), (\d)\}", _TEXT)]


def read(choice: int, m: int, n: int, k: int, sms: int) -> int:
    """About how much the busiest CTA copies to shared memory; latency counts as 64 rows."""
    (tokens, columns), (use, ctas) = (
        TILES[choice // len(CLUSTERS)],
        CLUSTERS[choice % len(CLUSTERS)],
    )
    down, right = (2 if use == "shares_b" else 1), (2 if use == "shares_a" else 1)
    units = math.ceil(m / (tokens * down)) * math.ceil(n / (columns * right))
    parts = ctas if use == "splits_k" else 1
    blocks = math.ceil(k / 128 / parts) + 4
    return math.ceil(units / (sms // ctas)) * blocks * (tokens + columns + 64)


def arguments(m: int, n: int, k: int) -> list[tuple[torch.Tensor, ...]]:
    def codes(rows: int) -> torch.Tensor:
        values = torch.randint(0, 120, (rows, k), dtype=torch.uint8, device="cuda")
        return values.view(torch.float8_e4m3fn)

    blocks = -(-k // 128)
    return [
        (
            codes(m),
            codes(n),
            torch.rand(blocks, -(-m // 4) * 4, device="cuda")[:, :m].T,
            torch.rand(-(-n // 128), blocks, device="cuda"),
            torch.empty(m, n, dtype=torch.bfloat16, device="cuda"),
        )
        for _ in range(max(2, L2_BYTES // (n * k + m * k)))
    ]


def replay(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds of a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls * 1e3


def sweep_shape(m: int, n: int, k: int, choices: Sequence[int]) -> dict[str, Any]:
    copies = arguments(m, n, k)
    us: dict[int, float] = {}
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    reads = {choice: read(choice, m, n, k, sms) for choice in choices}
    choices = [c for c in choices if reads[c] <= MOST_READ * min(reads.values())]
    # In a random order, because clocks change.
    for choice in random.sample(choices, len(choices)):
        _GEMM_SM90.launch(*copies[0], True, True, 1, choice)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for copy in copies:
                _GEMM_SM90.launch(*copy, True, True, 1, choice)
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
        rows.append(sweep_shape(m, n, k, args.choice or range(CHOICES)))
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
