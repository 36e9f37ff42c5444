# SPDX-License-Identifier: Apache-2.0
"""Buffers that the GPUs of one host share."""

from __future__ import annotations

from precast._ops.comm.cuda_ipc import (
    CudaRTLibrary,
    create_shared_buffer,
    cudaIpcMemHandle_t,
    free_shared_buffer,
)

__all__ = ["CudaRTLibrary", "create_shared_buffer", "cudaIpcMemHandle_t", "free_shared_buffer"]
