# SPDX-License-Identifier: Apache-2.0
"""Known causes of a failed compile, recognised in the output of the compiler."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from precast._jit.ptxas_gate import NOTE

_ERROR_LINE = re.compile(
    rf"error|fatal|undefined reference|cannot |No space|not found|{NOTE}", re.I
)

_TABLE: tuple[tuple[str, str], ...] = (
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full. Fix: free some space, or point PRECAST_CACHE_DIR to another file system",
    ),
    (
        r"Unsupported gpu architecture|is not (?:a )?(?:recognized|defined).*gpu",
        "this nvcc is too old for the target. Fix: install a newer CUDA toolkit",
    ),
    (
        r"unsupported GNU version|unsupported clang version",
        "this nvcc does not support so new a host compiler. Fix: set CXX to an older g++",
    ),
    (
        r"fatal error: (?:cuda|crt/|nv/|cub/|thrust/)\S*: No such file",
        "CUDA headers are missing. Fix: reinstall the toolkit (see: precast doctor), or: "
        'pip install "cuda-toolkit[cccl,crt,cudart,nvcc]==13.0.*"',
    ),
    (
        r"fatal error: (?:tvm|dlpack)/\S*: No such file",
        "the headers of tvm-ffi are missing. Fix: pip install --force-reinstall apache-tvm-ffi",
    ),
    (
        r"(?:nvcc|cicc|ptxas|cudafe\+\+|g\+\+|cc1plus): (?:not found|No such file|cannot execute)",
        "a program of the compiler is missing. Fix: reinstall the toolkit (see: precast doctor)",
    ),
    (r"cannot find -l\S+", "a library to link with is missing. Fix: see precast doctor"),
    (r"#error", "the kernel refuses this configuration; the line above says why"),
    (
        r"\bKilled\b|Cannot allocate memory|out of memory|signal 9",
        "the compiler ran out of memory. Fix: set MAX_JOBS to a smaller number of compilers",
    ),
)


def first_errors(output: str, limit: int = 12) -> str:
    """The lines that look like errors; the last lines if none does."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    return "\n".join(f"    {line}" for line in (errors or lines[-limit:])[:limit])


def cause(output: str, returncode: int, folder: Path) -> str:
    """One line with the cause and its fix; an empty string if the cause is not known."""
    try:
        full = shutil.disk_usage(folder).free < 1 << 16
    except OSError:
        full = False
    if full:
        output = "No space left on device\n" + output
    if returncode in (-9, 137):
        output += "\nKilled"
    for pattern, text in _TABLE:
        if re.search(pattern, output):
            return text
    return ""


def os_cause(error: OSError, folder: Path) -> str:
    """As :func:`cause`, for a failed system call."""
    words: Sequence[tuple[int, str]] = (
        (errno.ENOSPC, "No space left on device"),
        (errno.EDQUOT, "Disk quota exceeded"),
    )
    for number, text in words:
        if error.errno == number:
            return cause(text, 1, folder)
    return ""
