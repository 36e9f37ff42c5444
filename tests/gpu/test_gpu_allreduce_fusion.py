# SPDX-License-Identifier: Apache-2.0
"""All-reduce fused with what follows it: ranks that are streams, and ranks that are processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks_support import launch

pytestmark = pytest.mark.alone

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count()


def test_ranks_that_are_streams_of_one_gpu() -> None:
    said = launch(HERE / "allreduce_fusion_streams.py", "60", "50")
    assert [f"{world} ranks, bfloat16: 60 calls" in said for world in (2, 4, 8)] == [True] * 3


def test_one_rank_whose_peers_have_sent() -> None:
    said = launch(HERE / "allreduce_fusion_alone.py", "60")
    assert [f"rank 0 of {world}: 60 calls" in said for world in (2, 4, 8)] == [True] * 3


@pytest.mark.parametrize("what", ["late", "shapes"])
def test_a_wait_that_is_bounded(what: str) -> None:
    assert "found" in launch(HERE / "allreduce_fusion_timeout.py", what)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("memory", ["symmetric", "ipc"])
def test_two_processes(memory: str) -> None:
    options = ["--ipc"] if memory == "ipc" else []
    assert "2 processes" in launch(HERE / "allreduce_fusion_ranks.py", *options, processes=2)


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_four_processes() -> None:
    assert "4 processes" in launch(HERE / "allreduce_fusion_ranks.py", processes=4)


def test_eight_processes() -> None:
    """On fewer GPUs their kernels take turns, which is slow."""
    few = [] if GPUS >= 8 else ["--calls", "12", "--replays", "4", "--dtypes", "bfloat16"]
    assert "8 processes" in launch(HERE / "allreduce_fusion_ranks.py", *few, processes=8)
