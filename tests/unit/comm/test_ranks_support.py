# SPDX-License-Identifier: Apache-2.0
"""A program of several ranks ends within seconds when one of them fails or hangs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ranks_support import launch

HANGS = """
import os, sys, time
from ranks_support import run_rank

def main():
    if os.environ["RANK"] == sys.argv[1]:
        {what}
    time.sleep(600)  # as in a kernel that waits for its peer

run_rank(main, {seconds})
"""


@pytest.mark.parametrize(
    ("what", "seconds", "words"),
    [
        ("raise AssertionError('wrong sum')", 300, "wrong sum"),
        ("sys.exit()", 300, "SystemExit"),
        ("pass", 3, "Timeout"),
    ],
)
def test_a_failed_rank_ends_the_others(tmp_path: Path, what: str, seconds: int, words: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(HANGS.format(what=what, seconds=seconds), encoding="utf-8")
    started = time.monotonic()
    with pytest.raises(AssertionError, match=words):
        launch(script, "1", processes=2, seconds=120)
    assert time.monotonic() - started < 60


def test_a_program_that_does_not_end_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "child.wait()\n",
        encoding="utf-8",
    )
    with pytest.raises(Exception, match="timed out after"):
        launch(script, seconds=5)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _is_alive(status):
        time.sleep(0.05)
    assert not _is_alive(status)


def _is_alive(status: Path) -> bool:
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_program_prints(tmp_path: Path) -> None:
    script = tmp_path / "says.py"
    script.write_text(
        "import os\n"
        "from ranks_support import run_rank\n"
        # One string: where output is not buffered, each argument would be written by itself.
        'run_rank(lambda: print(f\'rank {os.environ["RANK"]} {os.environ["WORD"]}\'))\n',
        encoding="utf-8",
    )
    said = launch(script, processes=2, WORD="fine")
    assert "rank 0 fine" in said
    assert "rank 1 fine" in said
