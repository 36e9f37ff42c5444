# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group make the workspaces of the fused all-reduce."""

from __future__ import annotations

import inspect
from typing import Any

from precast._base.log import get_logger
from precast._base.torch import torch
from precast._op.mode import is_reference
from precast._ops.comm.allreduce_fusion import load_kernels
from precast._ops.comm.comm_backend import TorchDistBackend
from precast._ops.comm.peer_buffers import PeerBuffers, make_peer_buffers, obstacle
from precast._ops.comm.workspace import (
    CONTROL_BYTES,
    AllReduceFusionWorkspace,
    GroupAllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
)
from precast.api_logging import precast_api

#: The world sizes that modules exist for.
WORLDS = (2, 4, 8)
_MIB = 1 << 20
#: A receive buffer is at least as large as a group of the longest rows needs, and at most as large
#: as pays: a longer message goes in several rounds.
_MIN_REGION, _MAX_REGION = 1 * _MIB, 64 * _MIB
#: The largest message in one phase: ``is_one_shot`` of comm/allreduce_cut.cuh; a test compares.
ONE_SHOT_BYTES = {2: 1 << 62, 4: 128 << 10, 8: 64 << 10}


@precast_api
def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: Any | None = None,
    force_oneshot_support: bool = False,
    group: Any | None = None,
    *,
    top_k: int | None = None,
    rms_eps: float | None = None,
    weight_bias: float | None = None,
    routed_scaling_factor: float | None = None,
    include_shared_expert: bool | None = None,
    add_residual: bool | None = None,
    write_residual_output: bool | None = None,
    apply_rms_norm: bool | None = None,
    output_dtype: torch.dtype | None = None,
    dynamic_fp8: bool | None = None,
    write_norm_output: bool | None = None,
    config: Any | None = None,
) -> AllReduceFusionWorkspace:
    """Make what :func:`allreduce_fusion` needs of a group of ranks; every rank calls it.

    Parameters
    ----------
    backend : str
        ``"auto"`` or ``"trtllm"``: the kernels of precast where the GPUs of all ranks can access
        each other's memory, and otherwise the process group (NCCL) with separate kernels for what
        follows, which a line in the log says. ``"mnnvl"`` and ``"mnnvl-cutedsl"``, FlashInfer's
        backends for NVLink multicast, are refused.
    world_size, rank : int
        The number of ranks, and the number of this one. Kernels exist for 2, 4 and 8 ranks.
    max_token_num, hidden_dim : int
        The largest input. Others may have any shape of at most as many elements.
    dtype : torch.dtype
        float16, bfloat16 or float32.
    gpus_per_node : int, optional
        Ignored: ranks tell each other their hosts.
    comm_backend : CommBackend, optional
        What ranks exchange handles with. Default: ``group``.
    force_oneshot_support : bool
        Ignored: both strategies take messages of all sizes.
    group : torch.distributed.ProcessGroup, optional
        The ranks. Default: those of ``comm_backend`` if it is a :class:`TorchDistBackend`,
        otherwise all processes.
    top_k, rms_eps, weight_bias, routed_scaling_factor, include_shared_expert : optional
        Must be None, as the next ones: they belong to ``"mnnvl-cutedsl"``.
    add_residual, write_residual_output, apply_rms_norm, output_dtype : optional
        Must be None.
    dynamic_fp8, write_norm_output, config : optional
        Must be None.

    Returns
    -------
    AllReduceFusionWorkspace
        Its ``backend`` is ``"trtllm"`` where the kernels of precast run. It may serve several
        streams if they do not run calls at once; streams that do need a workspace each.

    Raises
    ------
    ValueError
        Another backend, dtype, size or option; a ``world_size`` or ``rank`` that is not that of
        ``group``.
    RuntimeError
        Without a process group; if GPUs cannot share memory and there is no group for NCCL.

    Notes
    -----
    A rank has two receive buffers of about ``max_token_num * hidden_dim`` elements (two ranks) or
    1.5 to 1.75 times as many, at most 64 MiB each; longer messages go in several rounds. The memory
    is that of torch's symmetric memory, or of CUDA's IPC handles where that is missing. NVLink
    multicast is not used. ``PRECAST_COMM_TIMEOUT`` bounds how long kernels wait for each other, for
    debugging.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     workspace = precast.comm.create_allreduce_fusion_workspace(
    ...         world_size=1, rank=0, max_token_num=4, hidden_dim=2, dtype=torch.bfloat16
    ...     )
    >>> workspace.is_buffer_size_sufficient(1, 4, 2, torch.bfloat16)
    True
    >>> workspace.destroy()
    """
    arguments = locals()
    function = "create_allreduce_fusion_workspace"
    if backend in ("mnnvl", "mnnvl-cutedsl"):
        raise ValueError(
            f"{function}: backend={backend!r} needs NVLink multicast, which precast does not use. "
            f"Fix: backend='auto'"
        )
    parameters = inspect.signature(create_allreduce_fusion_workspace).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    given = [name for name in options if arguments[name] is not None]
    if given:
        raise ValueError(
            f"{function}: {', '.join(given)} must be None, because backend 'mnnvl-cutedsl' alone "
            f"has it. Fix: pass rms_eps and weight_bias to allreduce_fusion()"
        )
    if backend not in ("auto", "trtllm"):
        raise ValueError(f"{function}: backend must be 'auto' or 'trtllm', got {backend!r}")
    sizes = {
        name: arguments[name]
        for name in ("world_size", "rank", "max_token_num", "hidden_dim", "dtype")
    }
    for name, value in sizes.items():
        if value is None:
            raise ValueError(f"{function}: {name} must be given, got None")
    return make_workspace(function, **sizes, comm_backend=comm_backend, group=group)


def region_bytes(world_size: int, message_bytes: int, row_bytes: int) -> int:
    """The bytes of a receive buffer for messages of ``message_bytes`` in rows of ``row_bytes``.

    One phase receives the message of each peer. Two phases receive twice ``1 / world_size`` of it,
    and up to a group of rows more.
    """
    peers = world_size - 1
    one = peers * min(message_bytes, ONE_SHOT_BYTES[world_size])
    two = 2 * peers * (message_bytes // world_size + row_bytes)
    wanted = one if world_size == 2 else max(one, two)
    size = min(max(wanted + 64 * 1024, _MIN_REGION), _MAX_REGION)
    return -(-size // 4096) * 4096


def make_workspace(
    function: str,
    world_size: int,
    rank: int,
    max_token_num: int,
    hidden_dim: int,
    dtype: torch.dtype,
    comm_backend: Any,
    group: Any,
) -> AllReduceFusionWorkspace:
    """Make the workspace of a group of ranks, each of which calls it."""
    _check(
        function,
        dtype,
        world_size=world_size,
        rank=rank,
        max_token_num=max_token_num,
        hidden_dim=hidden_dim,
    )
    distributed = torch.distributed
    initialised = distributed.is_available() and distributed.is_initialized()
    if group is None and comm_backend is not None:
        group = getattr(comm_backend, "_group", None)
    has_world = comm_backend is None or isinstance(comm_backend, TorchDistBackend)
    if group is None and has_world and world_size > 1:
        if not initialised:
            raise RuntimeError(
                f"{function}: {world_size} ranks need a process group. Fix: call "
                f"torch.distributed.init_process_group() first"
            )
        group = distributed.group.WORLD
    if group is not None and (group.size(), group.rank()) != (world_size, rank):
        raise ValueError(
            f"{function}: world_size and rank must be those of group, {group.size()} and "
            f"{group.rank()}, got {world_size} and {rank}"
        )
    sizes = (world_size, rank, max_token_num, hidden_dim, dtype)
    if is_reference() or world_size == 1:
        return GroupAllReduceFusionWorkspace(*sizes, group)

    def exchange(item: Any) -> tuple[Any, ...]:
        if comm_backend is not None:
            return tuple(comm_backend.allgather(item))
        items: list[Any] = [None] * world_size
        distributed.all_gather_object(items, item, group=group)
        return tuple(items)

    device = torch.device("cuda", torch.cuda.current_device())
    own = None if world_size in WORLDS else f"there are kernels for {WORLDS} GPUs"
    reason = obstacle(exchange, device, own)
    if reason is None:
        message = max_token_num * hidden_dim * dtype.itemsize
        region = region_bytes(world_size, message, hidden_dim * dtype.itemsize + 16)
        size = CONTROL_BYTES + 2 * region
        made = make_peer_buffers(size, rank, device, group, exchange)
        if isinstance(made, PeerBuffers):
            made.own.fill_(0xFF)
            made.own[:CONTROL_BYTES].zero_()
            torch.cuda.synchronize(device)
            exchange(None)  # every rank has filled its buffer
            workspace = TRTLLMAllReduceFusionWorkspace(*sizes, group, made)
            load_kernels(workspace, dtype)
            return workspace
        reason = made
    if group is None:
        raise RuntimeError(
            f"{function}: the GPUs cannot share memory ({reason}), and without a process group "
            f"NCCL cannot take their place. Fix: pass group"
        )
    log = get_logger().warning if rank == 0 else get_logger().debug
    log(
        "all-reduce of %d ranks runs on %s, and what follows it in kernels of its own: %s",
        world_size,
        distributed.get_backend(group),
        reason,
    )
    return GroupAllReduceFusionWorkspace(*sizes, group)


def _check(function: str, dtype: torch.dtype, **sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{function}: {name} must be an int, got {type(value).__name__}")
        if value < (0 if name == "rank" else 1):
            raise ValueError(f"{function}: {name} must be positive, got {value}")
    rank, world_size = sizes["rank"], sizes["world_size"]
    if rank >= world_size:
        raise ValueError(f"{function}: rank must be below world_size {world_size}, got {rank}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{function}: dtype must be float16, bfloat16 or float32, got {dtype}")
