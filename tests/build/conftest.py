# SPDX-License-Identifier: Apache-2.0
"""The build layer: needs nvcc, no GPU."""

from __future__ import annotations

from build_support import built
from wheel_support import checkout, core, modules, sm80, small_core, small_plan

__all__ = ["built", "checkout", "core", "modules", "sm80", "small_core", "small_plan"]
