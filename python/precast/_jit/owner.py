# SPDX-License-Identifier: Apache-2.0
"""The file beside a lock that says who holds it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from precast._base.files import read_regular


def sign(path: Path) -> None:
    """Write this process's name, which others log while they wait; a failure is ignored."""
    with contextlib.suppress(OSError), open(path, "w", opener=_no_link_or_pipe) as file:
        file.write(f"process {os.getpid()} on {os.uname().nodename}")


def holder(path: Path) -> str:
    """The process that signed last."""
    try:
        return read_regular(path)[0].decode()
    except (OSError, ValueError):
        return "another process"


def _no_link_or_pipe(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
