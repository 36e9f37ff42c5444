# SPDX-License-Identifier: Apache-2.0
"""All-reduce of registered buffers, with the interface of vLLM's custom all-reduce.

A handle (:mod:`precast._ops.comm.vllm_handles`) knows the buffers of all ranks. A kernel finds the
addresses of a buffer in a row of a table on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.export import Export, launches
from precast._op.validation import check_contiguous, check_memory_apart
from precast._ops.comm import handles as _handles
from precast._ops.comm import host_memory
from precast._ops.comm.handles import MAX_WORLD, VECTOR, Handle
from precast._ops.comm.host_all_reduce import reduce_on_host
from precast.api_logging import precast_api

#: kMaxBarrierCtas of include/precast/comm/peer_barrier.cuh; a test compares.
MAX_CTAS = 160


def vllm_all_reduce_reference(
    fa: int, inp: torch.Tensor, out: torch.Tensor, reg_buffer: int
) -> torch.Tensor:
    """:func:`vllm_all_reduce` in plain PyTorch, over shared memory of the host.

    Parameters
    ----------
    out : torch.Tensor
        Neither read nor written.

    Returns
    -------
    torch.Tensor
        The sum, with the shape of ``out`` and the dtype of ``inp``.
    """
    handle = _handles.find("vllm_all_reduce", fa)
    own = reg_buffer or inp.data_ptr()
    addresses = _registered(handle, own, handle.addresses)
    return reduce_on_host(handle.signals, handle.rank, addresses, inp, out.shape)


def _check(fa: int, inp: torch.Tensor, reg_buffer: int, **given: Any) -> None:
    """What the binding checks, and whether the buffer is registered."""
    handle = _handles.find("vllm_all_reduce", fa)
    _check_call(inp=inp, reg_buffer=reg_buffer, block=handle.block, **given)
    _registered(handle, reg_buffer or inp.data_ptr(), handle.addresses)


def _check_call(
    export: str,
    inp: torch.Tensor,
    out: torch.Tensor,
    reg_buffer: int,
    reg_buffer_sz_bytes: int,
    num_ctas: int,
    block: torch.Tensor,
) -> None:
    """What the binding checks."""
    check_contiguous(export, inp=inp, out=out)
    for name, tensor in (("inp", inp), ("out", out)):
        if tensor.data_ptr() % VECTOR:
            raise ValueError(
                f"{export}: {name} must start at a multiple of {VECTOR} bytes; call .clone()"
            )
    if inp.numel() != out.numel():
        raise ValueError(
            f"{export}: out must have inp's {inp.numel()} elements, got shape {[*out.shape]}"
        )
    size = inp.numel() * inp.itemsize
    if size % VECTOR:
        raise ValueError(
            f"{export}: inp must have a multiple of {VECTOR} bytes, got shape {[*inp.shape]}"
        )
    if not 1 <= num_ctas <= MAX_CTAS:
        raise ValueError(f"{export}: num_ctas must be 1 to {MAX_CTAS}, got {num_ctas}")
    if reg_buffer and size > reg_buffer_sz_bytes:
        raise ValueError(
            f"{export}: inp must fit reg_buffer's {reg_buffer_sz_bytes} bytes, got {size}"
        )
    if reg_buffer % VECTOR:
        raise ValueError(f"{export}: reg_buffer must be a multiple of {VECTOR}, got {reg_buffer}")
    if reg_buffer:
        registered = host_memory.view(reg_buffer, size, inp.dtype)
        check_memory_apart(export, "out", out, registered, "reg_buffer")
        check_memory_apart(export, "reg_buffer", registered, inp, "inp")
    _, world, _, room, one_shot_bytes, *_ = block.tolist()
    part = -(-size // VECTOR // world) * VECTOR
    if size > one_shot_bytes and part > room:
        raise ValueError(
            f"{export}: inp of {size} bytes needs {part} bytes behind the signals of each rank, "
            f"got {room}. Fix: create_shared_buffer(vllm_meta_size() + the largest input)"
        )


def _registered(handle: Handle, address: int, table: dict[int, Any]) -> Any:
    try:
        return table[address]
    except KeyError:
        raise ValueError(
            f"vllm_all_reduce: the buffer at {address:#x} must be registered. Fix: "
            f"vllm_register_buffer(), or pass a registered reg_buffer"
        ) from None


def _run(
    function: Callable[..., None],
    fa: int,
    inp: torch.Tensor,
    out: torch.Tensor,
    reg_buffer: int,
    *sizes: int,
) -> None:
    """Run the module's function with the row of the buffer, a new one while a graph is captured."""
    handle = _handles.find("vllm_all_reduce", fa)
    is_captured = reg_buffer == 0 and torch.cuda.is_current_stream_capturing()
    if is_captured:
        index = handle.next_row("vllm_all_reduce")
        row = handle.row(index)
    else:
        row = _registered(handle, reg_buffer or inp.data_ptr(), handle.row_of)
    try:
        function(inp, out, reg_buffer, *sizes, row, handle.block)
    except RuntimeError as error:  # a kernel before may have given up waiting
        reason = handle.explain_failure()
        if reason is None:
            raise
        raise RuntimeError(f"vllm_all_reduce: {reason}") from error
    if is_captured and inp.numel():
        handle.take_row()
        handle.captured.append((index, inp.data_ptr()))


def _reduce(inp: torch.Tensor, out: torch.Tensor, inputs: int, block: torch.Tensor) -> None:
    """What the kernel does with these arguments, over memory of the host."""
    rank, world, *_ = block.tolist()
    signals = block.tolist()[-MAX_WORLD:][:world]
    addresses = (ctypes.c_int64 * world).from_address(inputs)
    out.copy_(reduce_on_host(signals, rank, [*addresses], inp, out.shape))


#: The export of the modules, which gets the addresses of all ranks.
_KERNEL = Export(
    "custom_all_reduce",
    "custom_all_reduce",
    "inp:T out!:T reg_buffer:int reg_buffer_sz_bytes:int num_ctas:int inputs:int block:block",
    write=_reduce,
    check=_check_call,
    kinds={"block": Kind("Tensor {name}")},
    function="vllm_all_reduce",
    traced=False,
)
#: The op, which finds them by the handle.
_ALL_REDUCE = Export(
    "custom_all_reduce",
    "custom_all_reduce",
    "fa:int inp:T out!:T reg_buffer:int reg_buffer_sz_bytes:int num_ctas:int",
    reference=vllm_all_reduce_reference,
    check=_check,
    around=_run,
    function="vllm_all_reduce",
    torch_name="vllm_all_reduce",
)


@precast_api
@launches(_ALL_REDUCE)
def vllm_all_reduce(
    fa: int,
    inp: torch.Tensor,
    out: torch.Tensor,
    reg_buffer: int,
    reg_buffer_sz_bytes: int,
    num_ctas: int,
) -> None:
    r"""Add the inputs of all ranks.

    .. math:: out_i = \mathrm{round}\left(\sum_k inp^{(k)}_i\right)

    Every rank must call it with the same sizes, dtype and ``num_ctas``, in the same order.

    Parameters
    ----------
    fa : int
        The handle of :func:`vllm_init_custom_ar`.
    inp : torch.Tensor
        Any shape, float16, bfloat16 or float32, contiguous, 16-byte aligned, on the GPU of the
        handle. It has a multiple of 16 bytes.
    out : torch.Tensor
        As many elements of the same dtype, contiguous, 16-byte aligned. Overwritten; shares no
        memory with ``inp`` and ``reg_buffer``.
    reg_buffer : int
        The address of a registered buffer of this rank, into which ``inp`` is copied for its peers.
        0: ``inp`` itself starts a registered buffer, or a CUDA graph is captured. After a capture,
        :func:`vllm_get_graph_buffer_ipc_meta` and :func:`vllm_register_graph_buffers` must tell
        the ranks of each other's inputs before the graph is replayed.
    reg_buffer_sz_bytes : int
        The bytes of ``reg_buffer``.
    num_ctas : int
        CTAs of 512 threads at most, 1 to 160. 36 are enough for NVLink. Calls that may run at once
        must together have at most as many as the GPU has multiprocessors.

    Raises
    ------
    ValueError
        No handle; a tensor that is not on the GPU, another dtype, strides, alignment or size than
        above; memory that overlaps; a buffer that is not registered or too small; more than two
        ranks and too few bytes behind their signals. ``out`` is untouched.

    Notes
    -----
    fp32 sums in the order of ranks, rounded once, so that all ranks have the same bits. Up to
    512 KiB (four ranks) or 256 KiB (six or eight), and always for two, each rank reads the inputs
    of all others; above, it reduces its part and reads the parts of the others. Ranks wait for each
    other on the GPU: a rank that does not call leaves the others waiting, unless
    ``PRECAST_COMM_TIMEOUT`` was set when the handle was made. Allocates nothing; safe in CUDA
    graphs; not differentiable. In reference mode, buffers are memory of the host.

    Examples
    --------
    In each of two processes::

        meta = create_shared_buffer(vllm_meta_size() + size)
        buffers = create_shared_buffer(size)
        rank_data = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        fa = vllm_init_custom_ar(meta, rank_data, rank, True)
        vllm_register_buffer(fa, buffers)
        vllm_all_reduce(fa, x, out, buffers[rank], size, 36)
    """
