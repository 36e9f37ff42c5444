# SPDX-License-Identifier: Apache-2.0
"""The same call of precast without what the case is about, such as sinks, from the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "precast"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    return case.without
