# SPDX-License-Identifier: Apache-2.0
"""Every public name of :mod:`precast.comm`; each is imported at its first use."""

from precast._ops.comm.allreduce_fusion import allreduce_fusion as allreduce_fusion
from precast._ops.comm.allreduce_fusion import (
    allreduce_fusion_reference as allreduce_fusion_reference,
)
from precast._ops.comm.comm_backend import CommBackend as CommBackend
from precast._ops.comm.comm_backend import TorchDistBackend as TorchDistBackend
from precast._ops.comm.create_workspace import (
    create_allreduce_fusion_workspace as create_allreduce_fusion_workspace,
)
from precast._ops.comm.cuda_ipc import CudaRTLibrary as CudaRTLibrary
from precast._ops.comm.cuda_ipc import create_shared_buffer as create_shared_buffer
from precast._ops.comm.cuda_ipc import free_shared_buffer as free_shared_buffer
from precast._ops.comm.custom_all_reduce import vllm_all_reduce as vllm_all_reduce
from precast._ops.comm.custom_all_reduce import (
    vllm_all_reduce_reference as vllm_all_reduce_reference,
)
from precast._ops.comm.mapping import Mapping as Mapping
from precast._ops.comm.patterns import AllReduceFusionPattern as AllReduceFusionPattern
from precast._ops.comm.patterns import QuantizationSFLayout as QuantizationSFLayout
from precast._ops.comm.trtllm_ar import trtllm_allreduce_fusion as trtllm_allreduce_fusion
from precast._ops.comm.trtllm_ar import (
    trtllm_create_ipc_workspace_for_all_reduce_fusion as trtllm_create_ipc_workspace_for_all_reduce_fusion,  # noqa: E501
)
from precast._ops.comm.trtllm_ar import (
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion as trtllm_destroy_ipc_workspace_for_all_reduce_fusion,  # noqa: E501
)
from precast._ops.comm.vllm_handles import vllm_dispose as vllm_dispose
from precast._ops.comm.vllm_handles import (
    vllm_get_graph_buffer_ipc_meta as vllm_get_graph_buffer_ipc_meta,
)
from precast._ops.comm.vllm_handles import vllm_init_custom_ar as vllm_init_custom_ar
from precast._ops.comm.vllm_handles import vllm_meta_size as vllm_meta_size
from precast._ops.comm.vllm_handles import vllm_register_buffer as vllm_register_buffer
from precast._ops.comm.vllm_handles import (
    vllm_register_graph_buffers as vllm_register_graph_buffers,
)
from precast._ops.comm.workspace import AllReduceFusionWorkspace as AllReduceFusionWorkspace
