# SPDX-License-Identifier: Apache-2.0
"""The gpu tests as several processes: each test runs once, on every GPU, and a failure is said."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ci_support import ROOT
from collect_support import collected

PART = """
echo "part $PRECAST_TEST_SHARD on $CUDA_VISIBLE_DEVICES" >>parts
echo "3 passed in 1 s"
[ "$PRECAST_TEST_SHARD" != "${FAULTY:-}" ] || { echo "E  wrong"; exit 1; }
"""


def in_parts(folder: Path, jobs: int, **environment: str) -> subprocess.CompletedProcess[str]:
    script = f". {ROOT}/ci/parts.sh; out=. in_parts tests {jobs} bash -c '{PART}'"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_parts_take_the_gpus_in_turn(tmp_path: Path) -> None:
    done = in_parts(tmp_path, 5, CUDA_VISIBLE_DEVICES="2,6")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 passed") == 5
    assert sorted((tmp_path / "parts").read_text().splitlines()) == [
        f"part {i}/5 on {(2, 6)[i % 2]}" for i in range(5)
    ]


def test_a_part_that_fails_is_shown_and_fails_all(tmp_path: Path) -> None:
    done = in_parts(tmp_path, 3, FAULTY="1/3")
    assert done.returncode == 1
    assert done.stdout.count("E  wrong") == 1
    assert "error: tests, part 1 of 3: status 1; the whole log is in ./tests-1.log" in done.stderr
    assert len((tmp_path / "parts").read_text().splitlines()) == 3


def test_what_runs_alone_is_in_no_part() -> None:
    files = [f"test_gpu_{name}.py" for name in ("testing", "errors", "packbits")]
    expressions = ["-m", "gpu"], ["-m", "alone"], ["-m", "not alone"]
    every, alone, parts = map(set, collected(files, *expressions))
    assert alone | parts == every
    assert not alone & parts
    # By its file, by its own mark, and because it fills the memory.
    for name in ("agree_on_a_long_kernel", "more_items_than_a_kernel_can_number", "2_to_31"):
        assert any(name in test for test in alone), name
    assert any("test_gpu_errors" in test for test in parts)
