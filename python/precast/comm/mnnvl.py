# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer's module of this name has for one host: groups of processes, and mappings."""

from __future__ import annotations

from precast._ops.comm.comm_backend import CommBackend, TorchDistBackend
from precast._ops.comm.fabric import is_mnnvl_fabric_supported
from precast._ops.comm.mapping import Mapping

__all__ = ["CommBackend", "Mapping", "TorchDistBackend", "is_mnnvl_fabric_supported"]
