# SPDX-License-Identifier: Apache-2.0
"""PyTorch, operator by operator: the benchmark's ``Case.eager``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "torch"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    return case.eager
