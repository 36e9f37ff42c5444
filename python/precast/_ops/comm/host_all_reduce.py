# SPDX-License-Identifier: Apache-2.0
"""The all-reduce of registered buffers by the host, over shared memory: its reference."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

from precast._base.torch import torch
from precast._ops.comm import host_memory

_WORDS = 8  # of a row of flags: one for each rank
_POLL_SECONDS = 5e-5
_LAG_SECONDS = 60.0


def reduce_on_host(
    signals: Sequence[int],
    rank: int,
    buffers: Sequence[int],
    source: torch.Tensor,
    shape: torch.Size,
) -> torch.Tensor:
    """The sum of the buffers of all ranks, after ``source`` was copied to this rank's.

    Parameters
    ----------
    signals, buffers : sequence of int
        For each rank the address of its flags, and of its buffer.
    """
    size = source.numel() * source.itemsize
    for address in (*signals, *buffers):
        region = host_memory.find(address)
        if region is None:
            raise ValueError(
                f"vllm_all_reduce: buffers must be memory of the host in reference mode, got the "
                f"address {address:#x}. Fix: call create_shared_buffer() in reference mode, too"
            )
    own = host_memory.view(buffers[rank], size, source.dtype)
    if own.data_ptr() != source.data_ptr():
        own.copy_(source.flatten())
    _barrier(signals, rank)
    total = torch.zeros(source.numel(), dtype=torch.float32)
    for address in buffers:  # in the order of ranks, as the kernel adds
        total += host_memory.view(address, size, source.dtype).float()
    _barrier(signals, rank)  # The others have read this rank's buffer.
    return total.to(source.dtype).view(shape)


def _barrier(signals: Sequence[int], rank: int) -> None:
    """Wait for all ranks. The flags are those of CTA 0 of the kernel: counts that only grow."""
    world = len(signals)
    flags = [(ctypes.c_uint32 * _WORDS).from_address(address) for address in signals]
    count = (flags[rank][rank] + 1) & 0xFFFFFFFF
    time.sleep(0)  # Gives up the interpreter's lock, which orders the copy before the flags.
    for peer in range(world):
        flags[peer][rank] = count
    started = time.monotonic()
    for peer in range(world):
        while (flags[rank][peer] - count) & 0x80000000:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - started > _LAG_SECONDS:
                raise RuntimeError(
                    f"vllm_all_reduce: rank {peer} did not call it within {_LAG_SECONDS:.0f} s "
                    f"after rank {rank}"
                )
