# SPDX-License-Identifier: Apache-2.0
"""Handles of the all-reduce of registered buffers, by the functions of vLLM's custom all-reduce.

They know the buffers of all ranks: those that ranks register, and those that a captured CUDA graph
reads, which ranks exchange after the capture.
"""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.torch import torch
from precast._op.mode import is_reference
from precast._ops.comm import handles as _handles
from precast._ops.comm.cuda_ipc import (
    HANDLE_BYTES,
    close_allocation,
    export_allocation,
    open_allocation,
)
from precast._ops.comm.handles import META_BYTES, VECTOR, WORLDS, Handle, bytes_behind
from precast.api_logging import precast_api


def _check_addresses(function: str, name: str, addresses: Sequence[int], world: int) -> None:
    legal = len(addresses) == world and all(a > 0 and a % VECTOR == 0 for a in addresses)
    if not legal:
        raise ValueError(
            f"{function}: {name} must be {world} addresses that are multiples of {VECTOR}, got "
            f"{[*addresses]}"
        )


@precast_api
def vllm_init_custom_ar(
    ipc_tensors: list[int], rank_data: torch.Tensor, rank: int, full_nvlink: bool
) -> int:
    """Make a handle for the all-reduce of a group of ranks.

    Parameters
    ----------
    ipc_tensors : list of int
        For each of 2, 4, 6 or 8 ranks, the address of memory of its GPU that all ranks may write,
        as this rank sees it: ``create_shared_buffer(vllm_meta_size() + n)``. The first
        :func:`vllm_meta_size` bytes must be zeros when the first rank calls
        :func:`vllm_all_reduce`. The ``n`` bytes behind hold intermediate sums: for more than two
        ranks ``n`` is at least the bytes of the largest input divided by the number of ranks.
    rank_data : torch.Tensor
        Memory of the handle on this rank's GPU, of any dtype, contiguous and 16-byte aligned, with
        64 bytes for each registered buffer and for each call in a captured graph.
    rank : int
        This rank.
    full_nvlink : bool
        Whether NVLink connects all pairs of GPUs. Accepted for FlashInfer's signature: the results
        are the same, and this kernel runs wherever GPUs can access each other.

    Returns
    -------
    int
        The handle, for this process alone. :func:`vllm_dispose` ends it.

    Raises
    ------
    ValueError
        Another number of ranks; a rank that is none of them; an address that is null, unaligned or
        not of a GPU; a buffer without room for the signals; ``rank_data`` that is not on a GPU, not
        contiguous, unaligned or smaller than a row.

    Notes
    -----
    Source: the interface is vLLM's, as FlashInfer has it.
    """
    function = "vllm_init_custom_ar"
    world = len(ipc_tensors)
    if world not in WORLDS:
        raise ValueError(
            f"{function}: ipc_tensors must have {', '.join(map(str, WORLDS))} ranks, got {world}. "
            f"Fix: use NCCL for other numbers of GPUs"
        )
    if not 0 <= rank < world:
        raise ValueError(f"{function}: rank must be 0 to {world - 1}, got {rank}")
    _check_addresses(function, "ipc_tensors", ipc_tensors, world)
    if not isinstance(rank_data, torch.Tensor):
        raise TypeError(
            f"{function}: rank_data must be a torch.Tensor, got {type(rank_data).__name__}"
        )
    if not (rank_data.is_cuda or is_reference()):
        raise ValueError(f"{function}: rank_data must be a CUDA tensor, got {rank_data.device}")
    if not rank_data.is_contiguous() or rank_data.data_ptr() % VECTOR:
        raise ValueError(
            f"{function}: rank_data must be contiguous and start at a multiple of {VECTOR} bytes"
        )
    try:
        room = bytes_behind(ipc_tensors[rank])
    except ValueError as error:
        raise ValueError(f"{function}: ipc_tensors[{rank}]: {error}") from None
    if room < META_BYTES:
        raise ValueError(
            f"{function}: ipc_tensors[{rank}] must have vllm_meta_size() = {META_BYTES} bytes, got "
            f"{room}"
        )
    handle = Handle(ipc_tensors, rank_data, rank)
    handle.next_row(function)
    return _handles.add(handle)


@precast_api
def vllm_dispose(fa: int) -> None:
    """End a handle, and unmap the buffers of peers that it has opened.

    Parameters
    ----------
    fa : int
        The handle. No kernel or graph that uses it may run any more. Buffers that the caller has
        registered are left alone.

    Raises
    ------
    ValueError
        If it is no handle, or disposed.
    RuntimeError
        If a kernel has given up waiting for a peer (``PRECAST_COMM_TIMEOUT``).
    """
    handle = _handles.remove("vllm_dispose", fa)
    reason = handle.explain_failure()
    if reason is not None:  # The CUDA context is lost, and with it every mapping.
        raise RuntimeError(f"vllm_dispose: {reason}")
    for address in handle.opened.values():
        close_allocation(address)


@precast_api
def vllm_meta_size() -> int:
    """Return the bytes that :func:`vllm_init_custom_ar` needs of each rank for signals."""
    return META_BYTES


@precast_api
def vllm_register_buffer(fa: int, fake_ipc_ptrs: list[int]) -> None:
    """Register a buffer of each rank, from which :func:`vllm_all_reduce` may read.

    Every rank must register its buffers in the same order.

    Parameters
    ----------
    fa : int
        The handle.
    fake_ipc_ptrs : list of int
        The address of the buffer of each rank, as this rank sees it: what
        :func:`create_shared_buffer` returns. Multiples of 16.

    Raises
    ------
    ValueError
        If it is no handle; another number of addresses; an address that is null or unaligned; more
        buffers than ``rank_data`` has room for.

    Notes
    -----
    Not legal while a CUDA graph is captured. A buffer that is registered again has the new
    addresses.
    """
    function = "vllm_register_buffer"
    handle = _handles.find(function, fa)
    _check_addresses(function, "fake_ipc_ptrs", fake_ipc_ptrs, handle.world)
    row = handle.next_row(function)
    handle.fill_row(row, fake_ipc_ptrs)
    handle.take_row()
    own = fake_ipc_ptrs[handle.rank]
    handle.addresses[own] = [*fake_ipc_ptrs]
    handle.row_of[own] = handle.row(row)


@precast_api
def vllm_get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """Return what peers need to read the inputs of this rank's captured graphs.

    Parameters
    ----------
    fa : int
        The handle.

    Returns
    -------
    handles : list of int
        The bytes of 64-byte IPC handles, one handle for each call since the last
        :func:`vllm_register_graph_buffers`.
    offsets : list of int
        For each, the bytes from the start of the allocation to the input.

    Raises
    ------
    ValueError
        If it is no handle.
    RuntimeError
        If the memory of an input cannot be shared, such as torch's expandable segments.
    """
    handle = _handles.find("vllm_get_graph_buffer_ipc_meta", fa)
    exported = [export_allocation(address) for _, address in handle.captured]
    return [byte for name, _ in exported for byte in name], [offset for _, offset in exported]


@precast_api
def vllm_register_graph_buffers(
    fa: int, handles: list[list[int]], offsets: list[list[int]]
) -> None:
    """Register the inputs of captured graphs, which may be replayed from then on.

    Parameters
    ----------
    fa : int
        The handle.
    handles, offsets : list of list of int
        What :func:`vllm_get_graph_buffer_ipc_meta` returned on each rank.

    Raises
    ------
    ValueError
        If it is no handle; another number of ranks; ranks that captured different numbers of
        calls; offsets that are negative or unaligned. Nothing is registered.
    RuntimeError
        If the memory of a peer cannot be opened.
    """
    function = "vllm_register_graph_buffers"
    handle = _handles.find(function, fa)
    count = len(handle.captured)
    if (len(handles), len(offsets)) != (handle.world, handle.world):
        raise ValueError(
            f"{function}: handles and offsets must be of {handle.world} ranks, got {len(handles)} "
            f"and {len(offsets)}"
        )
    for rank, (bytes_of_rank, offsets_of_rank) in enumerate(zip(handles, offsets)):
        if (len(bytes_of_rank), len(offsets_of_rank)) != (count * HANDLE_BYTES, count):
            raise ValueError(
                f"{function}: every rank must have captured {count} calls as this rank has, got "
                f"{len(offsets_of_rank)} offsets and {len(bytes_of_rank)} bytes of handles of rank "
                f"{rank}"
            )
        if any(offset < 0 or offset % VECTOR for offset in offsets_of_rank):
            raise ValueError(
                f"{function}: offsets must be multiples of {VECTOR}, got {[*offsets_of_rank]} of "
                f"rank {rank}"
            )
    rows = []
    for call, (_, own) in enumerate(handle.captured):
        row = []
        for rank in range(handle.world):
            if rank == handle.rank:
                row.append(own)
                continue
            first = call * HANDLE_BYTES
            name = bytes(handles[rank][first : first + HANDLE_BYTES])
            if name not in handle.opened:
                handle.opened[name] = open_allocation(name)
            row.append(handle.opened[name] + offsets[rank][call])
        rows.append(row)
    for (index, _), row in zip(handle.captured, rows):
        handle.fill_row(index, row)
    handle.captured = []
