# SPDX-License-Identifier: Apache-2.0
"""The build layer: needs nvcc, no GPU."""

from __future__ import annotations

from build_support import built
from wheel_support import core, sm80

__all__ = ["built", "core", "sm80"]
