#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time the tiles and kinds of clusters of a GEMM for Hopper, for fit_gemm.py.

    python benchmarks/sweep_gemm.py --op OP --json FILE [--shape M,N,K ...] [--choice NUMBER ...]

OP is fp8_gemm_sm90, gemm_sm90 or scaled_gemm_sm90.

Without --shape, these are weights of several models with numbers of tokens from 1 to 8192. Each
choice is timed in a CUDA graph of calls on several copies of the arguments, which together exceed
the L2 cache. The graph has many calls, because the SMs that the CTAs of a call get depend on the
calls before it: it takes some calls until they lie as they do in a model. Choices that read far
more than others are left out, and one that is much slower than the best so far, in its first
replay, gets no more of them. FILE gets a row for each shape: `m`, `n`, `k`, and `us`, the shortest
time of each choice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from precast._ops.gemm import _tuning
from precast._plan import gemm_model
from precast._plan.gemm_model import Choice
from precast._plan.gemm_table import Shape

#: Columns and depth of weights.
WEIGHTS = (
    (7168, 2048), (4096, 7168), (2112, 7168), (24576, 1536), (7168, 16384), (1536, 7168),
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (5120, 3072),
    (3072, 1536), (32768, 512), (7168, 1024), (2048, 2048), (18432, 7168), (1024, 8192),
    (10240, 8192),
)  # fmt: skip
ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
#: Replays of a choice, and times the best so far that a first replay may take.
REPLAYS, HOPELESS = 4, 1.6
L2_BYTES = 200_000_000
#: Microseconds that a graph takes, about, and the most calls in it.
GRAPH_US, MOST_CALLS = 600.0, 60
#: Choices that read so many times what the least one does are left out.
MOST_READ = 3.0
#: What the operands of each op are.
OPERANDS = {family.op: operands for operands, family in gemm_model.FAMILIES.items()}


def read(choice: Choice, shape: Shape, sms: int) -> int:
    """About how much the busiest CTA copies to shared memory; latency counts as 64 rows."""
    (use, ctas), m, n = choice.cluster, shape.m, shape.n
    tokens, columns = choice.tile.tokens, choice.tile.weights
    k = shape.k * choice.family.element_bytes
    down, right = (2 if use == "shares_b" else 1), (2 if use == "shares_a" else 1)
    units = math.ceil(m / (tokens * down)) * math.ceil(n / (columns * right))
    parts = ctas if use == "splits_k" else 1
    blocks = math.ceil(k / 128 / parts) + 4
    return math.ceil(units / (sms // ctas)) * blocks * (tokens + columns + 64)


def calls_of_graph(shape: Shape) -> int:
    """So many calls that a graph of them takes about GRAPH_US by the model."""
    expected = gemm_model.ranking(shape.problem(gemm_model.SMS), shape.operands)[0][1].us
    return min(MOST_CALLS, math.ceil(GRAPH_US / expected))


def replay(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds of a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls * 1e3


def sweep_shape(
    operands: str, m: int, n: int, k: int, numbers: Sequence[int] = ()
) -> dict[str, Any]:
    shape = Shape("plain", 1, m, n, k, operands)
    family = gemm_model.FAMILIES[operands]
    count = max(2, L2_BYTES // (family.element_bytes * k * (m + n)))
    copies = [_tuning.arguments(shape, torch.device("cuda")) for _ in range(count)]
    us: dict[int, float] = {}
    calls = max(count, calls_of_graph(shape))
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    choices = [c for c in gemm_model.choices(operands) if not numbers or c.number in numbers]
    least = min(read(choice, shape, sms) for choice in choices)
    choices = [c for c in choices if read(c, shape, sms) <= MOST_READ * least]
    # In a random order, because clocks change.
    for choice in random.sample(choices, len(choices)):
        launch = _tuning.call(shape, choice)
        launch(*copies[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for copy in itertools.islice(itertools.cycle(copies), calls):
                launch(*copy)
        replay(graph, calls)
        found = replay(graph, calls)
        if found < HOPELESS * min(us.values(), default=found):
            found = min(found, *(replay(graph, calls) for _ in range(REPLAYS - 1)))
        us[choice.number] = found
    return {"m": m, "n": n, "k": k, "us": {str(c): round(us[c], 3) for c in sorted(us)}}


def parse_shape(text: str) -> tuple[int, int, int]:
    m, n, k = map(int, text.split(","))
    return m, n, k


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=OPERANDS, required=True)
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
        rows.append(sweep_shape(OPERANDS[args.op], m, n, k, args.choice or ()))
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
