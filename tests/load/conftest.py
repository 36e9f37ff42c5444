# SPDX-License-Identifier: Apache-2.0
"""The load layer: needs built modules, no GPU."""

from __future__ import annotations

from build_support import built

__all__ = ["built"]
