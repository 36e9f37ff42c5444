# SPDX-License-Identifier: Apache-2.0
"""torch.compile of ``Case.eager``: Inductor's kernel for exactly the shape of the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "torch"


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if case.eager is None:
        return None
    import torch

    torch._dynamo.reset()
    return torch.compile(case.eager, dynamic=False, fullgraph=True)
