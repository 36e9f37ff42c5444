# SPDX-License-Identifier: Apache-2.0
"""Which file serves a module on a device, and why."""

from __future__ import annotations

from precast._runtime.loader import (
    Loader,
    Resolution,
    Step,
    get_function,
    load_library,
    loader,
    plan,
)

__all__ = [
    "Loader",
    "Resolution",
    "Step",
    "get_function",
    "load_library",
    "loader",
    "plan",
]
