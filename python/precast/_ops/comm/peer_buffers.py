# SPDX-License-Identifier: Apache-2.0
"""Memory of each GPU that the GPUs of all ranks may write.

Torch's symmetric memory makes it for a process group, and CUDA's IPC handles where that cannot.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from precast._base.log import get_logger
from precast._base.torch import torch

#: What ranks exchange: takes an object that can be pickled, returns those of all ranks in order.
Exchange = Callable[[Any], "tuple[Any, ...]"]


class PeerBuffers(NamedTuple):
    """The buffer of each rank, as this rank addresses it."""

    addresses: list[int]
    own: torch.Tensor  # this rank's, uint8
    owner: object  # what keeps the memory mapped
    close: Callable[[], None]


def host_name() -> str:
    """What tells hosts apart, and containers of one host that do not share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def obstacle(exchange: Exchange, device: torch.device, own: str | None = None) -> str | None:
    """Why the GPUs of all ranks cannot access each other's memory, or None. All ranks agree.

    ``own`` is what this rank has against it already.
    """
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))
    ranks = exchange((host_name(), uuid, own))
    for rank, (host, _, reason) in enumerate(ranks):
        if reason is not None:
            return f"rank {rank}: {reason}"
        if host != ranks[0][0]:
            return f"rank {rank} is on another host than rank 0"
    uuids = [uuid for _, uuid, _ in ranks]
    if len(set(uuids)) < len(uuids):
        return "two ranks share a GPU"
    refused = exchange(_refused_peer(device, uuids))
    return next((f"rank {rank}: {name}" for rank, name in enumerate(refused) if name), None)


def _refused_peer(device: torch.device, uuids: list[str]) -> str | None:
    """A GPU of the ranks whose memory this one cannot access, of those that this process sees."""
    for index in range(torch.cuda.device_count()):
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", index))
        if index == device.index or uuid not in uuids:
            continue
        if not torch.cuda.can_device_access_peer(device.index, index):
            return f"GPU {device.index} has no peer access to GPU {index}"
    return None


def make_peer_buffers(
    size: int, rank: int, device: torch.device, group: Any, exchange: Exchange
) -> PeerBuffers | str:
    """Make a buffer of ``size`` bytes on each rank's GPU, or say why that is impossible.

    All ranks call it, and all get buffers or none does.
    """
    reasons = []
    if group is not None:
        made: PeerBuffers | str = _agreed(exchange, lambda: _symmetric(size, rank, device, group))
        if isinstance(made, PeerBuffers):
            return made
        reasons.append(f"symmetric memory: {made}")
    allocated = _agreed(exchange, lambda: _allocated(size, device))
    if isinstance(allocated, str):
        return "; ".join([*reasons, f"IPC: {allocated}"])
    own, name, offset = allocated
    names = exchange((name, offset))
    opened: PeerBuffers | str = _agreed(exchange, lambda: _opened(names, rank, own))
    if isinstance(opened, str):
        return "; ".join([*reasons, f"IPC: {opened}"])
    return opened


def _agreed(exchange: Exchange, make: Callable[[], Any]) -> Any:
    """What ``make`` returns if it succeeds on every rank; otherwise why it does not."""
    made: Any = None
    try:
        made, reason = make(), None
    except Exception as error:
        get_logger().debug("peer buffers", exc_info=True)
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
    for rank, theirs in enumerate(exchange(reason)):
        if theirs is not None:
            return f"rank {rank}: {theirs}"
    return made


def _symmetric(size: int, rank: int, device: torch.device, group: Any) -> PeerBuffers:
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(own, group=group.group_name)
    if handle is None:
        raise RuntimeError("rendezvous() returned nothing")
    offset = own.data_ptr() - int(handle.buffer_ptrs[rank])
    addresses = [int(address) + offset for address in handle.buffer_ptrs]
    return PeerBuffers(addresses, own, (own, handle), lambda: None)


def _allocated(size: int, device: torch.device) -> tuple[torch.Tensor, bytes, int]:
    from precast._ops.comm.cuda_ipc import export_allocation

    own = torch.empty(size, dtype=torch.uint8, device=device)
    name, offset = export_allocation(own.data_ptr())
    return own, bytes(name), offset


def _opened(names: tuple[Any, ...], rank: int, own: torch.Tensor) -> PeerBuffers:
    from precast._ops.comm.cuda_ipc import close_allocation, open_allocation

    opened: list[int] = []
    addresses = []
    for peer, (name, offset) in enumerate(names):
        if peer == rank:
            addresses.append(own.data_ptr())
            continue
        opened.append(open_allocation(name))
        addresses.append(opened[-1] + offset)

    def close() -> None:
        while opened:
            close_allocation(opened.pop())

    return PeerBuffers(addresses, own, own, close)
