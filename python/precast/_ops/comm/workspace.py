# SPDX-License-Identifier: Apache-2.0
"""Workspaces of the fused all-reduce: buffers that ranks share, or a process group in their place.

A kernel gets a workspace as a params block, a small CPU tensor of integers, whose order is that of
``WorkspaceBlock`` in ``csrc/comm/allreduce_fusion_binding.cc``.
"""

from __future__ import annotations

import abc
import contextlib
import warnings
import weakref
from typing import Any

from precast._base import env
from precast._base.log import get_logger
from precast._base.torch import torch
from precast._op.mode import is_reference
from precast._ops.comm.peer_buffers import PeerBuffers, make_peer_buffers, obstacle

#: The world sizes that modules exist for.
WORLDS = (2, 4, 8)
#: kControlBytes of comm/allreduce_exchange.cuh; a test compares.
CONTROL_BYTES = 1024
_REPORT_WORDS = 8
_MAX_WORLD = 8
_MIB = 1 << 20
#: A receive buffer is at least as large as a group of the longest rows needs, and at most as large
#: as pays: a longer message goes in several rounds.
_MIN_REGION, _MAX_REGION = 1 * _MIB, 64 * _MIB
#: The largest message in one phase: ``is_one_shot`` of comm/allreduce_cut.cuh; a test compares.
ONE_SHOT_BYTES = {2: 1 << 62, 4: 128 << 10, 8: 64 << 10}
_STAGES = {
    1: "in a barrier",
    2: "for its input",
    3: "for its part of the input",
    4: "for the rows that it reduces",
    5: "for the shape of its call",
}


class AllReduceFusionWorkspace(abc.ABC):
    """What :func:`allreduce_fusion` needs of a group of ranks.

    Attributes
    ----------
    world_size, rank : int
        The size of the group, and the number of this process in it.
    """

    world_size: int
    rank: int

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size = world_size
        self.rank = rank
        self._destroyed = False

    @property
    @abc.abstractmethod
    def backend(self) -> str:
        """``"trtllm"`` where the kernels of precast run; otherwise the process group's backend."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Free what the workspace holds; ranks may do so at any time and in any order.

        It waits for this GPU. The workspace cannot be used any more, nor can a CUDA graph that has
        captured it. A second call does nothing.
        """

    @abc.abstractmethod
    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: Any = None,
    ) -> bool:
        """Whether a call of these sizes may use the workspace.

        Parameters
        ----------
        tp_size : int
            The number of ranks.
        num_tokens, hidden_dim : int
            The shape of the input.
        dtype : torch.dtype
            Its dtype.
        use_oneshot : bool, optional
            Either way is possible for all sizes, so it is not looked at.
        """

    def gather(self, input: torch.Tensor) -> list[torch.Tensor]:
        """The inputs of all ranks, for references."""
        raise NotImplementedError

    def __del__(self) -> None:
        if getattr(self, "_destroyed", True):
            return
        warnings.warn(
            f"a {type(self).__name__} was not destroyed. Fix: call its destroy()",
            ResourceWarning,
            stacklevel=2,
        )
        with contextlib.suppress(Exception):
            self.destroy()


class _GroupedWorkspace(AllReduceFusionWorkspace):
    """A workspace with a process group, which may be None."""

    def __init__(
        self,
        world_size: int,
        rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype,
        group: Any,
    ) -> None:
        super().__init__(world_size, rank)
        self.group = group
        #: FlashInfer's names of what the workspace was made for.
        self.metadata: dict[str, Any] = {
            "tp_rank": rank,
            "tp_size": world_size,
            "max_token_num": max_token_num,
            "hidden_dim": hidden_dim,
            "use_fp32_lamport": dtype == torch.float32,
        }

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: Any = None,
    ) -> bool:
        made = self.metadata
        return bool(
            not self._destroyed
            and tp_size == self.world_size
            and num_tokens * hidden_dim <= made["max_token_num"] * made["hidden_dim"]
            and (dtype == torch.float32) == made["use_fp32_lamport"]
        )

    def gather(self, input: torch.Tensor) -> list[torch.Tensor]:
        if self.world_size == 1:
            return [input]
        if self.group is None:
            raise RuntimeError(
                "allreduce_fusion: the reference needs a process group, and the workspace has none"
            )
        sent = input.contiguous().view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, sent, group=self.group)
        return [part.view(input.dtype) for part in parts]


class GroupAllReduceFusionWorkspace(_GroupedWorkspace):
    """A process group that reduces, NCCL's as a rule, and separate kernels for what follows."""

    @property
    def backend(self) -> str:
        if self.group is None:
            return "single"
        return str(torch.distributed.get_backend(self.group))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Reduce in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor, group=self.group)

    def destroy(self) -> None:
        self._destroyed = True


class TRTLLMAllReduceFusionWorkspace(_GroupedWorkspace):
    """Buffers that the GPUs of all ranks write. The class has FlashInfer's name, and other memory.

    Attributes
    ----------
    block : torch.Tensor
        The params block.
    workspace_tensor : torch.Tensor
        The address of each rank's buffer, int64 on the GPU: what
        :func:`trtllm_allreduce_fusion` takes.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype,
        group: Any,
        buffers: PeerBuffers,
    ) -> None:
        super().__init__(world_size, rank, max_token_num, hidden_dim, dtype, group)
        self._buffers = buffers
        region = (buffers.own.numel() - CONTROL_BYTES) // 2
        seconds = env.COMM_TIMEOUT()
        self._report: torch.Tensor | None = None
        if seconds > 0:
            self._report = torch.zeros(_REPORT_WORDS, dtype=torch.int32).pin_memory()
        self.block = torch.tensor(
            [
                rank,
                world_size,
                region,
                int(seconds * 1e9),
                0 if self._report is None else self._report.data_ptr(),
                int(seconds > 0),
                -1,  # the largest message in one phase: the launcher's choice
                *(0, 0, 0, 0),  # threads, vectors, cluster, CTAs: the launcher's choice
                *buffers.addresses,
                *[0] * (_MAX_WORLD - world_size),
            ],
            dtype=torch.int64,
        )
        self.workspace_tensor = torch.tensor(
            buffers.addresses, dtype=torch.int64, device=buffers.own.device
        )
        self.ipc_handles = [buffers.addresses]
        self.mem_handles: list[Any] = []
        _BY_BLOCK[self.block.data_ptr()] = self
        _BY_TENSOR[self.workspace_tensor.data_ptr()] = self

    @property
    def backend(self) -> str:
        return "trtllm"

    def explain_failure(self) -> str | None:
        """What a kernel waited for in vain, if ``PRECAST_COMM_TIMEOUT`` is set and one did."""
        if self._report is None or int(self._report[0]) == 0:
            return None
        stage, rank, peer, cta, epoch, expected, got, mismatch = self._report.tolist()
        if mismatch:
            return (
                f"ranks {rank} and {peer} called allreduce_fusion with different shapes, dtypes, "
                f"patterns or use_oneshot (round {epoch}; signatures {expected & 0xFFFFFFFF:#x} "
                f"and {got & 0xFFFFFFFF:#x})"
            )
        return (
            f"rank {rank} waited longer than PRECAST_COMM_TIMEOUT={env.COMM_TIMEOUT():g} s "
            f"{_STAGES.get(stage, '')} from rank {peer} (round {epoch}, CTA {cta}). Rank {peer} "
            f"has ended, hangs, or has made another sequence of calls"
        )

    def raise_failure(self, error: RuntimeError) -> None:
        """Raise what :meth:`explain_failure` says of a CUDA error, if it says something."""
        reason = self.explain_failure()
        if reason is not None:
            raise RuntimeError(f"allreduce_fusion: {reason}") from error

    def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        # Why no barrier: when this GPU has finished its last round, it has received what peers
        # send in it, and no peer writes to it again.
        try:
            torch.cuda.synchronize(self._buffers.own.device)
        except RuntimeError as error:
            self.raise_failure(error)
            raise
        finally:
            _BY_BLOCK.pop(self.block.data_ptr(), None)
            _BY_TENSOR.pop(self.workspace_tensor.data_ptr(), None)
            self._buffers.close()
            del self._buffers


_BY_BLOCK: weakref.WeakValueDictionary[int, TRTLLMAllReduceFusionWorkspace] = (
    weakref.WeakValueDictionary()
)
_BY_TENSOR: weakref.WeakValueDictionary[int, TRTLLMAllReduceFusionWorkspace] = (
    weakref.WeakValueDictionary()
)


def workspace_of_block(block: torch.Tensor) -> TRTLLMAllReduceFusionWorkspace:
    """The workspace whose params block this is."""
    return _BY_BLOCK[block.data_ptr()]


def workspace_of_tensor(function: str, tensor: torch.Tensor) -> AllReduceFusionWorkspace:
    """The workspace whose addresses are in this tensor."""
    try:
        return _BY_TENSOR[tensor.data_ptr()]
    except (KeyError, AttributeError):
        raise ValueError(
            f"{function}: workspace_ptrs must be the tensor of a workspace that lives, as "
            f"trtllm_create_ipc_workspace_for_all_reduce_fusion() returns it"
        ) from None


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
    _check(function, world_size, rank, max_token_num, hidden_dim, dtype)
    distributed = torch.distributed
    initialised = distributed.is_available() and distributed.is_initialized()
    if group is None and comm_backend is not None:
        group = getattr(comm_backend, "_group", None)
    if group is None and comm_backend is None and world_size > 1:
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
            return TRTLLMAllReduceFusionWorkspace(*sizes, group, made)
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


def _check(
    function: str,
    world_size: int,
    rank: int,
    max_token_num: int,
    hidden_dim: int,
    dtype: torch.dtype,
) -> None:
    for name, value in (
        ("world_size", world_size),
        ("rank", rank),
        ("max_token_num", max_token_num),
        ("hidden_dim", hidden_dim),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{function}: {name} must be an int, got {type(value).__name__}")
        if value < (0 if name == "rank" else 1):
            raise ValueError(f"{function}: {name} must be positive, got {value}")
    if rank >= world_size:
        raise ValueError(f"{function}: rank must be below world_size {world_size}, got {rank}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{function}: dtype must be float16, bfloat16 or float32, got {dtype}")
