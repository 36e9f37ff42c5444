# SPDX-License-Identifier: Apache-2.0
"""The all-reduce of registered buffers, by the names of FlashInfer's module."""

from __future__ import annotations

from precast._ops.comm.custom_all_reduce import vllm_all_reduce as all_reduce
from precast._ops.comm.vllm_handles import vllm_dispose as dispose
from precast._ops.comm.vllm_handles import (
    vllm_get_graph_buffer_ipc_meta as get_graph_buffer_ipc_meta,
)
from precast._ops.comm.vllm_handles import vllm_init_custom_ar as init_custom_ar
from precast._ops.comm.vllm_handles import vllm_meta_size as meta_size
from precast._ops.comm.vllm_handles import vllm_register_buffer as register_buffer
from precast._ops.comm.vllm_handles import (
    vllm_register_graph_buffers as register_graph_buffers,
)

__all__ = [
    "all_reduce",
    "dispose",
    "get_graph_buffer_ipc_meta",
    "init_custom_ar",
    "meta_size",
    "register_buffer",
    "register_graph_buffers",
]
