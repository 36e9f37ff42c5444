# SPDX-License-Identifier: Apache-2.0
"""Which targets to compile for."""

from __future__ import annotations

from precast._plan.compilation_context import (
    CompilationContext,
)

__all__ = [
    "CompilationContext",
]
