# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the host in place of device memory, for reference mode.

Processes exchange it as they exchange device memory: one allocates and passes a handle, the others
open that. Addresses are plain integers, as those of the device are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from precast._base.torch import torch


class Region(NamedTuple):
    """Memory that this process has allocated or opened."""

    start: int
    size: int
    mapping: mmap.mmap
    descriptor: int  # of the process that allocated it, else -1


#: By address.
_regions: dict[int, Region] = {}


def allocate(size: int) -> tuple[int, bytes]:
    """The address of ``size`` zeros, and the handle with which another process opens them."""
    # Why no named file: this memory is gone when the last process is, however that ends.
    descriptor = os.memfd_create("precast")
    os.ftruncate(descriptor, size)
    return _map(descriptor, size, descriptor), f"/proc/{os.getpid()}/fd/{descriptor}".encode()


def open_handle(handle: bytes, size: int) -> int:
    """The address of the memory of a handle."""
    with Path(handle.decode()).open("r+b") as opened:
        return _map(opened.fileno(), size, -1)


def _map(descriptor: int, size: int, owned: int) -> int:
    mapping = mmap.mmap(descriptor, size)
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))
    _regions[start] = Region(start, size, mapping, owned)
    return start


def find(address: int) -> Region | None:
    """The memory that an address lies in."""
    for region in _regions.values():
        if region.start <= address < region.start + region.size:
            return region
    return None


def view(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The ``size`` bytes at an address as a tensor of one dimension."""
    if size == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=dtype)


def release(pointer: int) -> None:
    """Unmap memory that this process has allocated or opened."""
    region = _regions.pop(pointer, None)
    if region is None:
        raise RuntimeError(f"{pointer:#x} is not the start of a buffer")
    if region.descriptor >= 0:
        os.close(region.descriptor)
    # The mapping ends with its last reference: a tensor that views it may outlive the buffer.
