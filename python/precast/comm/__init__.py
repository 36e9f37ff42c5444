# SPDX-License-Identifier: Apache-2.0
"""All-reduce between the GPUs of one host, alone and fused with what follows it.

Process groups, rendezvous and memory handles are those of torch.distributed and of its symmetric
memory; NCCL does what the kernels here do not.
"""

from __future__ import annotations

from precast._ops.comm.allreduce_fusion import (
    allreduce_fusion,
    allreduce_fusion_reference,
    create_allreduce_fusion_workspace,
)
from precast._ops.comm.comm_backend import CommBackend, TorchDistBackend
from precast._ops.comm.cuda_ipc import CudaRTLibrary, create_shared_buffer, free_shared_buffer
from precast._ops.comm.custom_all_reduce import (
    vllm_all_reduce,
    vllm_all_reduce_reference,
    vllm_dispose,
    vllm_get_graph_buffer_ipc_meta,
    vllm_init_custom_ar,
    vllm_meta_size,
    vllm_register_buffer,
    vllm_register_graph_buffers,
)
from precast._ops.comm.mapping import Mapping
from precast._ops.comm.patterns import AllReduceFusionPattern, QuantizationSFLayout
from precast._ops.comm.trtllm_ar import (
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
)
from precast._ops.comm.workspace import AllReduceFusionWorkspace

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "CommBackend",
    "CudaRTLibrary",
    "Mapping",
    "QuantizationSFLayout",
    "TorchDistBackend",
    "allreduce_fusion",
    "allreduce_fusion_reference",
    "create_allreduce_fusion_workspace",
    "create_shared_buffer",
    "free_shared_buffer",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "vllm_all_reduce",
    "vllm_all_reduce_reference",
    "vllm_dispose",
    "vllm_get_graph_buffer_ipc_meta",
    "vllm_init_custom_ar",
    "vllm_meta_size",
    "vllm_register_buffer",
    "vllm_register_graph_buffers",
]
