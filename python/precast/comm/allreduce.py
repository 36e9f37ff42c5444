# SPDX-License-Identifier: Apache-2.0
"""All-reduce fused with what follows it."""

from __future__ import annotations

from precast._ops.comm.allreduce_fusion import allreduce_fusion, allreduce_fusion_reference
from precast._ops.comm.create_workspace import create_allreduce_fusion_workspace
from precast._ops.comm.patterns import AllReduceFusionPattern, QuantizationSFLayout
from precast._ops.comm.workspace import AllReduceFusionWorkspace

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "QuantizationSFLayout",
    "allreduce_fusion",
    "allreduce_fusion_reference",
    "create_allreduce_fusion_workspace",
]
