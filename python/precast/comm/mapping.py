# SPDX-License-Identifier: Apache-2.0
"""Which ranks share what, when kinds of parallelism are combined."""

from __future__ import annotations

from precast._ops.comm.mapping import Mapping

__all__ = ["Mapping"]
