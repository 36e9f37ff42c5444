# SPDX-License-Identifier: Apache-2.0
"""The peer layer: the same call by another library, where it and a CUDA device are there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "gpu"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "peer: needs a CUDA device and another library")
    config.addinivalue_line(
        "markers", "flashinfer_topk: FlashInfer compiles its top-k for it, for minutes"
    )
    config.addinivalue_line("markers", "jit: compiles kernels; needs nvcc and PRECAST_JIT=auto")
    config.addinivalue_line("markers", "without_gpu: of the peer tests, those that a CPU runs too")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not Path(item.path).is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.peer)
        if not (torch.cuda.is_available() or item.get_closest_marker("without_gpu")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh random inputs; a failing test shows the seed, ``PRECAST_TEST_SEED`` sets it."""
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    return torch.Generator("cuda").manual_seed(seed)
