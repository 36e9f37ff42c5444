# SPDX-License-Identifier: Apache-2.0
"""The one table of tolerances, and the comparison that uses it."""

from __future__ import annotations

from precast._base.tolerances import (
    TOLERANCES,
    Tolerance,
    assert_close,
    tolerance,
    tolerance_of_attention,
    tolerance_of_scales,
)

__all__ = [
    "TOLERANCES",
    "Tolerance",
    "assert_close",
    "tolerance",
    "tolerance_of_attention",
    "tolerance_of_scales",
]
