# SPDX-License-Identifier: Apache-2.0
"""How many compilers may run at once: limited by cores and by the memory that is free."""

from __future__ import annotations

import os
import re
from pathlib import Path

from precast._base import env as _env

#: A safe figure for one nvcc process of the larger kernel families.
BYTES_PER_JOB = 4 << 30
_MEMORY_SHARE = 0.6


def max_jobs() -> int:
    """``MAX_JOBS`` if set, else what cores and available memory (cgroup-aware) allow."""
    wanted = _env.MAX_JOBS()
    if wanted:
        return wanted
    by_memory = int(available_memory() * _MEMORY_SHARE / BYTES_PER_JOB)
    return max(1, min(available_cores(), by_memory))


def available_cores() -> int:
    """Cores that this process may use: affinity mask and cgroup quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory() -> int:
    """Bytes that can still be taken: the machine's, and what the cgroup leaves."""
    available = 1 << 62
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.strip().isdecimal() and used.strip().isdecimal():
        # File pages that nobody used lately count as used, but are given back on demand.
        cached = re.search(
            r"^inactive_file (\d+)$", _read("/sys/fs/cgroup/memory.stat"), re.MULTILINE
        )
        free = int(limit) - int(used) + (int(cached[1]) if cached else 0)
        available = min(available, max(0, free))
    return available


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
