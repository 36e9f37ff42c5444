# SPDX-License-Identifier: Apache-2.0
"""The file beside a lock that says who holds it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def sign(path: Path) -> None:
    """Write this process's name, which others log while they wait; a failure is ignored."""
    with contextlib.suppress(OSError), open(path, "w", opener=_without_links) as file:
        file.write(f"process {os.getpid()} on {os.uname().nodename}")


def holder(path: Path) -> str:
    """The process that signed last."""
    try:
        return path.read_text()
    except OSError:
        return "another process"


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
