# SPDX-License-Identifier: Apache-2.0
"""All-reduce fused with what follows it, by the names that FlashInfer's module has."""

from __future__ import annotations

from precast._ops.comm.patterns import AllReduceFusionPattern, QuantizationSFLayout
from precast._ops.comm.trtllm_ar import (
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
)

__all__ = [
    "AllReduceFusionPattern",
    "QuantizationSFLayout",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
]
