# SPDX-License-Identifier: Apache-2.0
"""Many processes at once, and processes that are killed in the middle of a compile."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import time
from collections.abc import Set
from pathlib import Path

import filelock
import pytest
from jit_support import compiles, run, success, taking, worker_command

from precast._base.trust import check_contents
from precast._jit import cache as jit_cache

#: Kills of a compile by quick fake compilers, and by the real ones; at night more of them.
KILLS, REAL_KILLS = (50, 4) if os.environ.get("TEST_ALL") else (12, 1)


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd="/"
    )


def eight(command: list[str], env: dict[str, str]) -> tuple[list[Path], int]:
    """Eight workers at once: what each got, and how often the module was compiled."""
    workers = [start(command, env) for _ in range(8)]
    done = []
    for worker in workers:
        out, err = worker.communicate(timeout=120)
        done.append(subprocess.CompletedProcess(command, worker.returncode, out, err))
    return [success(one) for one in done], sum(map(compiles, done))


def judge(root: Path) -> list[Path]:
    """All builds in the cache; asserts that each is whole and that no lock is held."""
    entries = jit_cache.contents(root).builds
    for entry in entries:
        assert entry.meta is not None, f"{entry.folder} is half-written"
        library = entry.folder / "tiny.so"
        problem = check_contents(library, entry.meta.size, entry.meta.sha256, "")
        assert problem is None
    for path in (root / jit_cache.LOCK_FOLDER).glob("*.lock"):
        with filelock.FileLock(path, timeout=5, preserve_lock_file=True):
            pass
    return [entry.folder for entry in entries]


def test_eight_processes_compile_at_most_twice_and_all_succeed(tiny, cache, fake, tmp_path):
    paths, count = eight(worker_command(tiny), taking(fake, 0.2))
    assert len(set(paths)) == 1
    assert 1 <= count <= 2
    assert (tmp_path / "fake" / "log").read_text().count("nvcc") == count
    assert ctypes.CDLL(str(paths[0])).tiny_product() == 42
    assert len(judge(cache / "v1")) == 1


def test_eight_processes_with_the_real_compilers(tiny, cache, real):
    paths, count = eight(worker_command(tiny), real)
    assert len(set(paths)) == 1
    assert 1 <= count <= 2
    assert run(worker_command(tiny, "load"), real).stdout.splitlines()[1] == "42"


def test_without_patience_for_the_lock_all_compile_and_one_is_published(tiny, cache, fake):
    env = {**taking(fake, 0.2), "PRECAST_LOCK_TIMEOUT": "0"}
    paths, count = eight(worker_command(tiny), env)
    assert len(set(paths)) == 1
    assert count >= 2
    assert len(judge(cache / "v1")) == 1


def kill_at(command: list[str], env: dict[str, str], seconds: float) -> bool:
    """Whether the worker was still running when it was killed after ``seconds``."""
    worker = start(command, env)
    try:
        worker.communicate(timeout=seconds)
        return False
    except subprocess.TimeoutExpired:
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=30)
        return True


def stages(root: Path) -> set[str]:
    """How far killed compiles had come, by what they left."""
    found = set()
    for folder in (root / jit_cache.WORK_FOLDER).glob("*"):
        names = {path.name for path in folder.rglob("*")}
        found.add(
            "publishing"
            if "publish" in names
            else "linking"
            if "tiny.so" in names
            else "compiling"
            if names
            else "starting"
        )
    return found


def torture(
    tiny: Path, root: Path, env: dict[str, str], kills: int, stages_wanted: Set[str] = frozenset()
) -> None:
    """At least so many kills, and more until one has met each stage that is wanted."""
    command = worker_command(tiny)

    def whole_run() -> tuple[Path, float]:
        begin = time.monotonic()
        return success(run(command, env, timeout=60)), time.monotonic() - begin

    library, whole = whole_run()
    dice = random.Random(20)
    killed, seen = 0, set()
    for attempt in range(8 * kills):
        if killed >= kills and stages_wanted <= seen:
            break
        for path in (library, library.parent / "meta.json"):
            path.unlink(missing_ok=True)
        if library.parent.exists():
            library.parent.rmdir()
        # A third of a worker's life is the start of Python, where there is nothing to harm.
        killed += kill_at(command, env, dice.uniform(0.3, 1.05) * whole)
        judge(root)
        seen |= stages(root)
        if attempt % 5 == 0:
            # Measured anew, because a machine that others use is not equally fast all the time.
            again, whole = whole_run()
            assert again == library
            assert judge(root) == [library.parent]
    assert killed >= kills
    assert stages_wanted <= seen
    assert whole_run()[0] == library


def test_kills_at_random_moments_leave_the_cache_intact(tiny, cache, fake):
    root = cache / "v1"
    torture(tiny, root, fake, KILLS, {"compiling", "linking"})
    # The last run compiled nothing that was there, and removed what the dead had left.
    assert list((root / jit_cache.WORK_FOLDER).iterdir()) == []


def test_kills_of_the_real_compilers_leave_the_cache_intact(tiny, cache, real):
    torture(tiny, cache / "v1", real, REAL_KILLS)
    assert run(worker_command(tiny, "load"), real).stdout.splitlines()[1] == "42"


def test_the_next_process_does_not_wait_for_one_that_was_killed(tiny, cache, fake):
    worker = start(worker_command(tiny), taking(fake, 20))
    owner = None
    for _ in range(200):
        owner = next((cache / "v1" / ".locks").glob("*.owner"), None) if cache.exists() else None
        if owner is not None and owner.read_text():
            break
        time.sleep(0.05)
    assert owner is not None
    worker.kill()
    worker.communicate(timeout=30)
    assert owner.read_text().startswith(f"process {worker.pid} on ")
    begin = time.monotonic()
    done = run(worker_command(tiny), taking(fake, 0.03))
    success(done)
    assert "waiting" not in done.stderr
    assert time.monotonic() - begin < 15


def test_one_that_lives_is_waited_for_and_named(tiny, cache, fake):
    worker = start(worker_command(tiny), taking(fake, 0.5))
    for _ in range(200):
        if cache.exists() and any((cache / "v1" / ".locks").glob("*.owner")):
            break
        time.sleep(0.05)
    done = run(worker_command(tiny), fake)
    out, _ = worker.communicate(timeout=60)
    assert (success(done), compiles(done)) == (Path(out.strip()), 0)
    assert (
        f"waiting for process {worker.pid} on {os.uname().nodename}, which compiles" in done.stderr
    )


def alive_after_a_while(processes: list[str]) -> list[str]:
    """Those that still exist after 5 s; the dead vanish when the first process collects them."""
    alive = processes
    for _ in range(100):
        alive = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
        if not alive:
            break
        time.sleep(0.05)
    return alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_compiler_outlives_its_process(tiny, cache, fake, tmp_path, number):
    worker = start(worker_command(tiny), {**taking(fake, 30), "MAX_JOBS": "2"})
    log = tmp_path / "fake" / "log"
    for _ in range(200):
        if log.exists() and len(log.read_text().splitlines()) == 2:
            break
        time.sleep(0.05)
    worker.send_signal(number)
    worker.wait(15)
    compilers = [line.split()[1] for line in log.read_text().splitlines()]
    assert len(compilers) == 2
    assert alive_after_a_while(compilers) == []
    worker.stdout.close()
    worker.stderr.close()
    # What it left is shown, and removed by the next process.
    assert len(jit_cache.contents(cache / "v1").leftovers) == 1
    success(run(worker_command(tiny), taking(fake, 0.03)))
    assert jit_cache.contents(cache / "v1").leftovers == []


def test_ctrl_c_ends_the_compilers_too(tiny, cache, fake, tmp_path):
    worker = start(worker_command(tiny), {**taking(fake, 30), "MAX_JOBS": "2"})
    log = tmp_path / "fake" / "log"
    for _ in range(200):
        if log.exists() and len(log.read_text().splitlines()) == 2:
            break
        time.sleep(0.05)
    time.sleep(0.1)  # Both are listed as running; a signal during a start would miss that one.
    worker.send_signal(signal.SIGINT)
    worker.communicate(timeout=15)
    compilers = [line.split()[1] for line in log.read_text().splitlines()]
    assert len(compilers) == 2
    assert alive_after_a_while(compilers) == []
    assert list((cache / "v1" / ".work").iterdir()) == []
