# SPDX-License-Identifier: Apache-2.0
"""How the loader decided which library serves a module."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """One candidate that the loader looked at, and its verdict.

    ``fault`` marks a provider that should have served and could not: it is damaged, stale or
    unsuited to this machine. The loader warns when it loads something else in its place.
    """

    source: str
    place: str
    accepted: bool
    reason: str
    fault: bool = False

    def __str__(self) -> str:
        verdict = "accepted" if self.accepted else "rejected"
        where = f" ({self.place})" if self.place else ""
        return f"{self.source}{where}: {verdict}: {self.reason}"


class Resolution(NamedTuple):
    """Which library serves a module on a device, and how that was decided."""

    module: str
    capability: str
    path: Path | None
    cuda_major: int
    steps: tuple[Step, ...]
