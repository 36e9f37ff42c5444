# SPDX-License-Identifier: Apache-2.0
"""What a handle of the all-reduce of registered buffers knows of its ranks.

A kernel finds the addresses of a buffer, one for each rank, in a row of a table on the device. So a
captured launch may know its row before the ranks have told each other their addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from precast._base import env
from precast._base.torch import torch
from precast._ops.comm import host_memory
from precast._ops.comm.cuda_ipc import allocation_of

#: Bytes in front of a rank's scratch memory. The binding checks that a rank's signals fit.
META_BYTES = 8192
WORLDS = (2, 4, 6, 8)
VECTOR = 16
MAX_WORLD = 8  # addresses in a row
ROW_BYTES = 8 * MAX_WORLD
#: Above these bytes ranks divide the work, by world size. Two ranks send as much either way.
_ONE_SHOT_BYTES = {2: 1 << 62, 4: 512 << 10, 6: 256 << 10, 8: 256 << 10}
_REPORT_WORDS = 8  # of WaitReport in comm/peer_memory.cuh


class Handle:
    """The buffers of all ranks, and the table of their addresses."""

    def __init__(self, signals: Sequence[int], rank_data: torch.Tensor, rank: int) -> None:
        self.signals = [*signals]
        self.rank = rank
        self.world = len(signals)
        self._table = rank_data.flatten().view(torch.uint8)
        self._rows = 0  # in use
        self.addresses: dict[int, list[int]] = {}  # of all ranks, by this rank's
        self.row_of: dict[int, int] = {}  # the address of a row, by this rank's address
        #: Inputs of graphs whose peers are not known yet: the index of the row, and the address.
        self.captured: list[tuple[int, int]] = []
        self.opened: dict[bytes, int] = {}  # allocations of peers, by IPC handle
        scratch = bytes_behind(signals[rank]) - META_BYTES
        seconds = env.COMM_TIMEOUT()
        self._report: torch.Tensor | None = None
        if seconds > 0 and rank_data.is_cuda:
            self._report = torch.zeros(_REPORT_WORDS, dtype=torch.int32).pin_memory()
        self.block = torch.tensor(
            [
                rank,
                self.world,
                META_BYTES,
                scratch,
                _ONE_SHOT_BYTES[self.world],
                0 if self._report is None else int(seconds * 1e9),
                0 if self._report is None else self._report.data_ptr(),
                *signals,
                *[0] * (MAX_WORLD - self.world),
            ],
            dtype=torch.int64,
        )

    def row(self, index: int) -> int:
        """The address of a row of the table."""
        return int(self._table.data_ptr()) + index * ROW_BYTES

    def next_row(self, function: str) -> int:
        """The index of the first row that is not in use."""
        if (self._rows + 1) * ROW_BYTES > self._table.numel():
            raise ValueError(
                f"{function}: rank_data must have {ROW_BYTES} bytes for each registered buffer and "
                f"each call in a captured graph, got {self._table.numel()} bytes for "
                f"{self._rows + 1} of them. Fix: pass a larger rank_data to vllm_init_custom_ar"
            )
        return self._rows

    def take_row(self) -> None:
        """Use :meth:`next_row`."""
        self._rows += 1

    def fill_row(self, index: int, addresses: Sequence[int]) -> None:
        """Write the addresses of a buffer to the table."""
        row = torch.tensor([*addresses, *[0] * (MAX_WORLD - self.world)], dtype=torch.int64)
        self._table[index * ROW_BYTES : (index + 1) * ROW_BYTES].copy_(row.view(torch.uint8))

    def explain_failure(self) -> str | None:
        """Why a kernel stopped waiting; None if none has, or without ``PRECAST_COMM_TIMEOUT``."""
        if self._report is None or int(self._report[0]) == 0:
            return None
        _, rank, peer, cta, count, *_ = self._report.tolist()
        return (
            f"rank {rank} waited longer than PRECAST_COMM_TIMEOUT={env.COMM_TIMEOUT():g} s for "
            f"rank {peer} (CTA {cta}, barrier {count}). Rank {peer} has ended, hangs, or has made "
            f"another sequence of calls"
        )


_handles: dict[int, Handle] = {}
_numbers = itertools.count(1)


def add(handle: Handle) -> int:
    """The number of a new handle."""
    number = next(_numbers)
    _handles[number] = handle
    return number


def find(function: str, fa: int) -> Handle:
    """The handle of a number."""
    try:
        return _handles[fa]
    except (KeyError, TypeError):
        raise ValueError(
            f"{function}: fa must be a handle of vllm_init_custom_ar that is not disposed, got "
            f"{fa!r}"
        ) from None


def remove(function: str, fa: int) -> Handle:
    """End a handle."""
    handle = find(function, fa)
    del _handles[fa]
    return handle


def bytes_behind(address: int) -> int:
    """The bytes from an address to the end of its allocation."""
    region = host_memory.find(address)
    if region is not None:
        return region.start + region.size - address
    base, size = allocation_of(address)
    return base + size - address
