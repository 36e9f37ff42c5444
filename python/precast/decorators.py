# SPDX-License-Identifier: Apache-2.0
"""Say which GPUs and backends an op supports."""

from __future__ import annotations

from precast._op.decorators import (
    backend_requirement,
    served_by,
    supported_compute_capability,
)

__all__ = [
    "backend_requirement",
    "served_by",
    "supported_compute_capability",
]
