# SPDX-License-Identifier: Apache-2.0
"""ci/ranks.sh: which programs it runs for how many GPUs, and what it says of one that fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ci_support import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with the programs, and a Python that says what it is asked to do."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "allreduce_fusion_ranks.py").touch()
    python = tmp_path / "python"
    python.write_text(
        """#!/usr/bin/env bash
case "$*" in
*device_count*) echo "${GPUS:-2}"; exit ;;
esac
echo "$PRECAST_JIT $*" >>calls
[[ -z "${FAULTY:-}" || "$*" != *"$FAULTY"* ]] || { echo "AssertionError: wrong"; exit 1; }
echo "4 calls, right"
"""
    )
    python.chmod(0o755)
    return tmp_path


def ranks(tree: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "ci" / "ranks.sh"), *argv],
        cwd=tree,
        env={**os.environ, "PYTHON": str(tree / "python"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_number_of_gpus_that_is_there(tree: Path) -> None:
    done = ranks(tree, GPUS="4", CALLS="7")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = (tree / "calls").read_text().splitlines()
    assert all(run.startswith("error ") for run in runs)
    for world, count in ((2, 5), (4, 5), (8, 0)):
        assert sum(f"--nproc-per-node {world} " in run for run in runs) == count
    assert sum("--parts calls --calls 7 " in run for run in runs) == 2
    assert done.stdout.count("4 calls, right") == len(runs)


def test_a_program_that_fails_is_said_and_the_others_run(tree: Path) -> None:
    done = ranks(tree, "2", FAULTY="--parts graphs")
    assert done.returncode == 1
    assert "graphs-2: status 1" in done.stdout
    assert "AssertionError: wrong" in done.stdout
    assert "the whole log is in build/ranks/graphs-2.log" in done.stderr
    assert "registered-2: status 0" in done.stdout


def test_it_says_what_is_missing(tree: Path) -> None:
    assert "has 1 GPUs, and ranks need at least 2" in ranks(tree, GPUS="1").stderr
    assert "has 2 GPUs, got 4" in ranks(tree, "4").stderr
    (tree / "tests" / "gpu" / "allreduce_fusion_ranks.py").unlink()
    done = ranks(tree)
    assert done.returncode == 2
    assert "Fix: run it where the tests are" in done.stderr
