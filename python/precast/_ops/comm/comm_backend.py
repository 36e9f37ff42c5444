# SPDX-License-Identifier: Apache-2.0
"""Groups of processes that exchange Python objects, as FlashInfer's workspaces take them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

from precast._base.torch import torch


class CommBackend(ABC):
    """A group of processes that exchange Python objects while they set something up.

    Engines derive their own from it. :class:`TorchDistBackend` is the one for a group of
    torch.distributed.
    """

    @abstractmethod
    def Get_rank(self) -> int:
        """Return the number of this process in the group."""

    @abstractmethod
    def Get_size(self) -> int:
        """Return how many processes the group has."""

    @abstractmethod
    def allgather(self, data: Any) -> Any:
        """Return what every process passes, in the order of their numbers."""

    @abstractmethod
    def bcast(self, data: Any, root: int) -> Any:
        """Return what process ``root`` passes."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for every process of the group."""

    @abstractmethod
    def Split(self, color: int, key: int) -> CommBackend:
        """Return the group of the processes that pass the same ``color``, ordered by ``key``."""


class TorchDistBackend(CommBackend):
    """A process group of torch.distributed as a :class:`CommBackend`.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Numbers of processes are those in this group. Default: all processes.

    Raises
    ------
    RuntimeError
        If torch.distributed is not initialised.
    """

    def __init__(self, group: Any | None = None) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise RuntimeError(
                "TorchDistBackend: torch.distributed must be initialised. Fix: call "
                "torch.distributed.init_process_group() first"
            )
        self._group = group

    def Get_rank(self) -> int:
        """Return the number of this process in the group; -1 if it is not part of it."""
        return int(torch.distributed.get_rank(self._group))

    def Get_size(self) -> int:
        """Return how many processes the group has."""
        return int(torch.distributed.get_world_size(self._group))

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """Return what every process passes, in the order of their numbers.

        Parameters
        ----------
        data : object
            Anything that can be pickled.
        """
        gathered: list[Any] = [None] * self.Get_size()
        torch.distributed.all_gather_object(gathered, data, group=self._group)
        return tuple(gathered)

    def bcast(self, data: Any, root: int) -> Any:
        """Return what process ``root`` passes.

        Parameters
        ----------
        data : object
            Anything that can be pickled. The other processes may pass anything.
        root : int
            The number of the process in this group.
        """
        if not 0 <= root < self.Get_size():
            raise ValueError(f"bcast: root must be 0 to {self.Get_size() - 1}, got {root}")
        box = [data]
        torch.distributed.broadcast_object_list(box, self._world_rank(root), group=self._group)
        return box[0]

    def barrier(self) -> None:
        """Wait for every process of the group."""
        torch.distributed.barrier(group=self._group)

    def Split(self, color: int, key: int) -> TorchDistBackend:
        """Return the group of the processes that pass the same ``color``.

        Every process of this group must call it. Processes that are not part of this group take no
        part.

        Parameters
        ----------
        color : int
            Processes with the same number form a group.
        key : int
            They are in ascending order of this, and in their present order where it is the same.
        """
        asked = enumerate(self.allgather((color, key)))
        order = sorted((theirs, rank) for rank, (shared, theirs) in asked if shared == color)
        ranks = [self._world_rank(rank) for _, rank in order]
        options: dict[str, Any] = {}
        if ranks != sorted(ranks):
            if "sort_ranks" not in inspect.signature(torch.distributed.new_group).parameters:
                raise RuntimeError(
                    f"Split: this torch.distributed cannot order a group as {ranks}. Fix: pass "
                    f"keys in the order of the processes, or install a torch whose new_group() "
                    f"has sort_ranks"
                )
            options["sort_ranks"] = False
        # Why local: processes of other colors, and those outside of this group, take no part.
        group = torch.distributed.new_group(ranks, use_local_synchronization=True, **options)
        self.barrier()  # No process tears its connections down while another one still connects.
        return TorchDistBackend(group)

    def _world_rank(self, rank: int) -> int:
        if self._group is None:
            return rank
        return int(torch.distributed.get_global_rank(self._group, rank))
