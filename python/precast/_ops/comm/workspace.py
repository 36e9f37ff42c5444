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
from precast._base.torch import torch
from precast._ops.comm.peer_buffers import PeerBuffers

#: kControlBytes of comm/allreduce_exchange.cuh; a test compares.
CONTROL_BYTES = 1024
_REPORT_WORDS = 8
_MAX_WORLD = 8
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
    metadata : dict
        What the workspace was made for, by FlashInfer's names.
    """

    world_size: int
    rank: int
    metadata: dict[str, Any]

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
            Ignored: either way is possible for all sizes.
        """
        made = self.metadata
        return bool(
            not self._destroyed
            and tp_size == self.world_size
            and num_tokens * hidden_dim <= made["max_token_num"] * made["hidden_dim"]
            and (dtype == torch.float32) == made["use_fp32_lamport"]
        )

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
        self.metadata = {
            "tp_rank": rank,
            "tp_size": world_size,
            "max_token_num": max_token_num,
            "hidden_dim": hidden_dim,
            "use_fp32_lamport": dtype == torch.float32,
        }

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
        """Why a kernel stopped waiting; None if none has, or without ``PRECAST_COMM_TIMEOUT``."""
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
