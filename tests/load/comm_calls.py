# SPDX-License-Identifier: Apache-2.0
"""Valid calls of the all-reduces, which reference mode cannot record: they need other processes.

One process holds the memory of all ranks, and its peers have arrived at every barrier for good. The
addresses of peers are in blocks that callers do not make, so no wrong argument reaches them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

import precast
from precast._ops.comm import handles, host_memory
from precast._ops.comm.patterns import GROUP, NO_QUANT, TENSOR, TOKEN
from precast._ops.comm.peer_buffers import PeerBuffers
from precast._ops.comm.workspace import CONTROL_BYTES, TRTLLMAllReduceFusionWorkspace
from precast.comm import vllm_init_custom_ar, vllm_meta_size, vllm_register_buffer

WORLD, BYTES = 2, 1 << 20
ROWS, HIDDEN = 5, 256
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Workspace(TRTLLMAllReduceFusionWorkspace):
    """A workspace of rank 0, whose peer has the same input."""

    def __init__(self) -> None:
        memory = torch.zeros(CONTROL_BYTES + 2 * BYTES, dtype=torch.uint8)
        buffers = PeerBuffers([memory.data_ptr()] * WORLD, memory, None, lambda: None)
        super().__init__(WORLD, 0, ROWS, HIDDEN, BF16, None, buffers)
        self._destroyed = True  # There is no GPU to wait for.

    def gather(self, input: torch.Tensor) -> list[torch.Tensor]:
        return [input] * self.world_size


@functools.cache
def _workspace() -> Workspace:
    return Workspace()


@functools.cache
def _handle() -> tuple[int, int]:
    """A handle, and the buffer of its rank 0, in shared memory of the host."""
    size = vllm_meta_size() + BYTES
    signals = [host_memory.allocate(size)[0] for _ in range(WORLD)]
    buffers = [host_memory.allocate(BYTES)[0] for _ in range(WORLD)]
    own = host_memory.view(signals[0], 4 * WORLD, torch.int32)
    own[1:] = 0x7FFFFFFF  # the flags of the peers: later than every barrier
    with precast.reference_mode():
        number = vllm_init_custom_ar(signals, torch.zeros(256, dtype=torch.uint8), 0, True)
        vllm_register_buffer(number, buffers)
    return number, buffers[0]


def _drawn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _norm(mode: int) -> tuple[Any, ...]:
    """All outputs that a mode has."""
    codes = torch.zeros(ROWS, HIDDEN, dtype=FP8) if mode != NO_QUANT else None
    scales: torch.Tensor | None = None
    if mode == TOKEN:
        scales = torch.zeros(ROWS, 1)
    elif mode == GROUP:
        scales = torch.zeros(HIDDEN // 128 // 4 + 1, -(-ROWS // 4) * 4, dtype=torch.int32)
        scales = scales[:, :ROWS].T
    x, residual, residual_out, norm_out = (_drawn(ROWS, HIDDEN) for _ in range(4))
    return (
        *(_workspace().block, WORLD, x, residual, _drawn(HIDDEN), residual_out, norm_out),
        *(codes, scales, torch.ones(1) if mode == TENSOR else None),
        *(mode, 128, 1e-6, 0.0, -1, False, False),
    )


@functools.cache
def comm_calls() -> dict[str, list[tuple[Any, ...]]]:
    """Calls by kernel, for a module of bfloat16 and two ranks."""
    fa, buffer = _handle()
    handle = handles.find("test", fa)
    x, out = _drawn(ROWS, HIDDEN), _drawn(ROWS, HIDDEN)
    copied = (x, out, buffer, BYTES, 8)
    in_place = host_memory.view(buffer, x.nbytes, BF16).view(ROWS, HIDDEN)
    row = handle.row_of[buffer]
    return {
        "allreduce": [(_workspace().block, WORLD, x, out, -1, False, False)],
        "allreduce_norm": [_norm(mode) for mode in (NO_QUANT, TENSOR, GROUP, TOKEN)],
        "custom_all_reduce": [
            (*copied, row, handle.block),
            (in_place, out, 0, 0, 8, row, handle.block),
        ],
        "vllm_all_reduce": [(fa, *copied)],
    }
