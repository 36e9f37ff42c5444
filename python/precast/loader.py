# SPDX-License-Identifier: Apache-2.0
"""Which file serves a module on a device, and why."""

from __future__ import annotations

from precast._plan.installed import plan
from precast._runtime.library import get_function, load_library
from precast._runtime.loader import Loader, loader
from precast._runtime.resolution import Resolution, Step

__all__ = [
    "Loader",
    "Resolution",
    "Step",
    "get_function",
    "load_library",
    "loader",
    "plan",
]
