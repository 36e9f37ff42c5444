# SPDX-License-Identifier: Apache-2.0
"""The sample for compute-sanitizer has every export, and its script fails when the tool does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ci_support import ROOT
from collect_support import GPU_TESTS, collected

from precast._op.dispatch import kernels
from precast._plan.planner import Plan


@pytest.mark.filterwarnings("ignore:.*scale as a float:FutureWarning")
def test_every_kernel_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU_TESTS))
    import sanitize_calls

    called: set[str] = set()
    for name, kernel in kernels().items():

        def run(*args: object, name: str = name, reference: object = kernel.reference) -> None:
            reference(*args)  # type: ignore[operator]
            called.add(name)

        monkeypatch.setattr(kernel, "reference", run)
    legal = 0
    for function, template in sanitize_calls.PAIRS:
        for words, call in sanitize_calls.calls(function, template):
            want = sanitize_calls.expected(function, template, call)
            assert want is not None or words != "small", (template.name_prefix, words)
            legal += want is not None
    exports = {export for op in Plan.load(ROOT).config.ops.values() for export in op.exports}
    # Which launches none, those that have a test of their own in the sample, and those of more
    # than one process, which programs of their own call under the tool.
    others = {"workspace_size", "run_paged_sm90", "run_ragged_sm90"}
    others |= {"run_paged_sm90_fp8", "run_ragged_sm90_fp8", "run_mla_sm90"}
    others |= {"allreduce", "allreduce_norm", "custom_all_reduce", "moe_few_tokens"}
    # On Hopper the same calls launch these in the place of the kernels of every GPU.
    # Kernels in CuTe DSL have tests of their own, beside their twins in CUDA.
    config = Plan.load(ROOT).config
    for op in (
        "fp8_gemm_gated_sm90",
        "fp8_gemm_sm90",
        "gemm_gated_sm90",
        "gemm_sm90",
        "int4_gemm_sm90",
        "mxfp4_gemm_sm90",
        "scaled_gemm_sm90",
    ):
        others |= {*config.ops[op].exports}
    others |= {e for op in config.ops.values() if op.is_cute_dsl for e in op.exports}
    assert exports - others <= called
    assert legal > 2 * len(sanitize_calls.PAIRS)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with the sample, and a sanitizer that says what it is asked to do."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_gpu_sanitize.py").touch()
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        """#!/usr/bin/env bash
echo "$PRECAST_TEST_SHARD $PYTORCH_NO_CUDA_MEMORY_CACHING $PRECAST_JIT $*" >>calls
case "$*" in
*--help*) echo "  --kernel-name arg" ;;
*out_of_bounds.py*) exit "${PLANTED:-99}" ;;
*"$FAULTY"*) for i in {1..9000}; do echo "Invalid read $i"; done; exit 99 ;;
*) echo "9 passed in 1 s" ;;
esac
"""
    )
    tool.chmod(0o755)
    return tmp_path


def sanitize(tree: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"SANITIZER": str(tree / "compute-sanitizer"), "JOBS": "2", "FAULTY": "none"}
    return subprocess.run(
        ["bash", str(ROOT / "ci" / "sanitize.sh"), *argv],
        cwd=tree,
        env={**os.environ, "PYTHON": sys.executable, **settings, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_both_tools_run_over_all_parts_of_the_sample(tree: Path) -> None:
    done = sanitize(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [line.split() for line in (tree / "calls").read_text().splitlines() if "pytest" in line]
    assert sorted((run[4], run[0]) for run in runs) == [
        ("memcheck", "0/2"),
        ("memcheck", "1/2"),
        ("racecheck", "0/2"),
        ("racecheck", "1/2"),
    ]
    for run in runs:
        assert run[1:3] == ["1", "error"]
        assert "kns=precast" in run
        assert run[run.index("--error-exitcode") + 1] == "99"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FAULTY": "--tool racecheck"}, "racecheck, part 0 of 2: status 99"),
        ({"PLANTED": "0"}, "a read past a tensor's end was not found (status 0)"),
        ({"PLANTED": "1"}, "a read past a tensor's end was not found (status 1)"),
    ],
)
def test_what_is_found_or_not_looked_for_is_a_failure(
    environment: dict[str, str], words: str, tree: Path
) -> None:
    done = sanitize(tree, **environment)
    assert done.returncode == 1
    assert words in done.stderr
    # A log of more than a pipe holds is cut, and stops nothing.
    assert done.stdout.count("Invalid read") == (60 * 2 if "FAULTY" in environment else 0)


def test_it_says_what_is_missing(tree: Path) -> None:
    done = sanitize(tree, SANITIZER="/nowhere/compute-sanitizer")
    assert done.returncode == 2
    assert "no /nowhere/compute-sanitizer. Fix:" in done.stderr
    shutil.rmtree(tree / "tests")
    done = sanitize(tree)
    assert done.returncode == 2
    assert "no tests/gpu/test_gpu_sanitize.py" in done.stderr


def test_it_is_a_stage_by_name_alone() -> None:
    text = (ROOT / "ci" / "gpu.sh").read_text()
    (default,) = [line for line in text.splitlines() if line.startswith("default_stages=")]
    assert "sanitize" not in default
    done = subprocess.run(
        ["bash", str(ROOT / "ci" / "gpu.sh"), "no-bundle", "sanitize"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no-bundle is no bundle" in done.stderr  # The stage is known.
    done = subprocess.run(
        ["bash", str(ROOT / "ci" / "gpu.sh"), "no-bundle", "sanitise"],
        capture_output=True,
        text=True,
        check=False,
    )
    stages = "install doctor tests jit peer bench startup sanitize ranks"
    assert f"no stage sanitise; legal: {stages}" in done.stderr


def test_parts_of_the_gpu_tests_are_all_of_them() -> None:
    shards = [{"PRECAST_TEST_SHARD": shard} for shard in ("", "0/3", "1/3", "2/3")]
    every, *parts = collected(["test_gpu_pdl.py"], environments=shards)
    assert len(every) > 3
    assert all(parts)
    assert sorted(test for part in parts for test in part) == sorted(every)
