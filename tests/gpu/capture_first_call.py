# SPDX-License-Identifier: Apache-2.0
"""Run by test_gpu_frameworks.py in a fresh process: capture each operator's very first launch."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_cases import DTYPES, grid

import precast
from precast.testing import assert_close


def main() -> None:
    generator = torch.Generator("cuda").manual_seed(torch.seed() % 2**31)
    words = {dtype: word for word, dtype in DTYPES.items()}
    for row in precast.preload():
        print(f"preloaded {row.module} from {row.source}: {row.path}")
    precast.freeze()
    for case, dtype in grid():
        args = case.arguments(case.input_shape(65, 1024), dtype, generator)
        want = case.expected(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = case.run(args)
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(outputs, want, strict=True):
            assert_close(got, expected, name=case.name)
        print(f"captured {case.name} {words[dtype]}")


if __name__ == "__main__":
    main()
