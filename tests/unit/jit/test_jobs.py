# SPDX-License-Identifier: Apache-2.0
"""How many compilers run at once."""

from __future__ import annotations

import os

import pytest

from precast._jit import jobs


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/proc/meminfo": "MemAvailable: 100000000 kB"}, 8),
        ({"/proc/meminfo": "MemAvailable: 14000000 kB"}, 2),
        ({"/proc/meminfo": "MemAvailable: 1000 kB"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "350000 100000"}, 3),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/memory.current": "1"}, 8),
        (
            {
                "/sys/fs/cgroup/memory.max": str(32 << 30),
                "/sys/fs/cgroup/memory.current": str(11 << 30),
            },
            3,
        ),
        (
            {
                "/sys/fs/cgroup/memory.max": str(32 << 30),
                "/sys/fs/cgroup/memory.current": str(31 << 30),
                "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {20 << 30}\nslab 2",
            },
            3,
        ),
        ({"/sys/fs/cgroup/memory.max": "5", "/sys/fs/cgroup/memory.current": "9"}, 1),
    ],
)
def test_jobs_are_limited_by_cores_and_memory(monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(jobs, "_read", lambda path: files.get(path, ""))
    assert jobs.max_jobs() == expected
    monkeypatch.setenv("MAX_JOBS", "5")
    assert jobs.max_jobs() == 5


def test_no_more_commands_run_at_once_than_allowed(make, tmp_path, monkeypatch):
    line = f'mkdir {tmp_path}/busy && sleep 0.1 && rmdir {tmp_path}/busy && echo > "$1"'
    monkeypatch.setenv("MAX_JOBS", "1")
    # `mkdir` of a command fails while another is at work.
    assert make(compile_line=line).build().is_file()
    assert not (tmp_path / "busy").exists()
