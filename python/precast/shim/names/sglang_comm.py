# SPDX-License-Identifier: Apache-2.0
"""The interface of FlashInfer's communicators, which SGLang derives its own from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class CommBackend(ABC):
    """A group of processes that exchange Python objects. precast itself uses none."""

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
