# SPDX-License-Identifier: Apache-2.0
"""Groups of processes that exchange Python objects."""

from __future__ import annotations

from precast._ops.comm.comm_backend import CommBackend, TorchDistBackend

__all__ = ["CommBackend", "TorchDistBackend"]
