# SPDX-License-Identifier: Apache-2.0
"""The separate ops of precast that a fused op replaces, from the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "precast"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    return None if case.parts is None else case.parts.run
