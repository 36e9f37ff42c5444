# SPDX-License-Identifier: Apache-2.0
"""The build layer: needs nvcc, no GPU."""

from __future__ import annotations

from build_support import built

__all__ = ["built"]
