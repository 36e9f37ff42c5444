# SPDX-License-Identifier: Apache-2.0
"""What a fused op replaces: ours, one after the other, as the benchmark gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "precast"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    return None if case.parts is None else case.parts.run
