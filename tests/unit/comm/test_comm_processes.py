# SPDX-License-Identifier: Apache-2.0
"""Groups of processes, shared buffers and the example, in real processes without a GPU."""

from __future__ import annotations

from pathlib import Path

from ranks_support import launch

ROOT = Path(__file__).resolve().parents[3]


def run(script: Path, processes: int, *arguments: str) -> str:
    variables = {"PYTHONPATH": str(ROOT / "python"), "CUDA_VISIBLE_DEVICES": ""}
    return launch(script, *arguments, processes=processes, **variables)


def test_groups_and_shared_buffers() -> None:
    said = run(Path(__file__).with_name("comm_ranks.py"), 4)
    assert all(f"rank {rank} is done" in said for rank in range(4))


def test_the_example_of_a_tensor_parallel_block() -> None:
    sizes = ["--hidden", "128", "--intermediate", "352", "--tokens", "3"]
    said = run(ROOT / "examples" / "tensor_parallel_mlp.py", 2, *sizes)
    assert "2 ranks, 3 tokens x 128" in said and "all ranks have the same bits" in said
    assert "): ok" in said
