# SPDX-License-Identifier: Apache-2.0
"""How many compilers may run at once, limited by cores and by free memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from precast._base import env as _env

#: An upper bound for one nvcc process of the largest kernel families.
BYTES_PER_JOB = 4 << 30
_MEMORY_SHARE = 0.6


def max_jobs() -> int:
    """``MAX_JOBS`` if it is set, otherwise what cores and free memory allow."""
    wanted = _env.MAX_JOBS()
    if wanted:
        return wanted
    by_memory = int(available_memory() * _MEMORY_SHARE / BYTES_PER_JOB)
    return max(1, min(available_cores(), by_memory))


def available_cores() -> int:
    """Cores that this process may use, by its affinity mask and its cgroup."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory() -> int:
    """Bytes that are free on this machine and within the cgroup."""
    available = 1 << 62
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.strip().isdecimal() and used.strip().isdecimal():
        # The cgroup counts cached file pages as used, but the kernel reclaims them on demand.
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
