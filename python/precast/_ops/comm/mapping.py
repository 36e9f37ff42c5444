# SPDX-License-Identifier: Apache-2.0
"""Which ranks share what, when tensor, context, pipeline and expert parallelism are combined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: The sizes that make a mapping, in the order of :meth:`Mapping.to_dict`.
_FIELDS = (
    "world_size",
    "rank",
    "gpus_per_node",
    "cp_size",
    "tp_size",
    "pp_size",
    "moe_tp_size",
    "moe_cluster_size",
    "moe_ep_size",
    "attn_tp_size",
    "attn_cp_size",
    "auto_parallel",
)


class Mapping:
    """The groups of ranks of a model that is spread over GPUs.

    A rank is ``(pp_rank * cp_size + cp_rank) * tp_size + tp_rank``: ranks of one tensor-parallel
    group are neighbours, then come those of context parallelism, and pipeline stages are outermost.
    Layers of experts divide a tensor-parallel group once more:
    ``tp_rank = (moe_tp_rank * moe_cluster_size + moe_cluster_rank) * moe_ep_size + moe_ep_rank``.
    Every group is a list of ranks, and each property such as ``tp_group`` is the one of this rank.

    Parameters
    ----------
    world_size : int
        The number of ranks, ``tp_size * pp_size * cp_size``.
    rank : int
        This rank.
    gpus_per_node : int
        Ranks of one host.
    cp_size, tp_size, pp_size : int
        Ranks of context, tensor and pipeline parallelism.
    cp_config : dict, optional
        Options of context parallelism; kept for the caller.
    moe_cluster_size, moe_tp_size, moe_ep_size : int
        Their product is ``tp_size``. -1 leaves a size to the others; without any of them, experts
        are divided as other layers are.
    attn_tp_size, attn_cp_size : int
        Their product is ``tp_size * cp_size``. -1 leaves a size to the other. Only an
        ``attn_cp_size`` of 1 is legal.
    auto_parallel : bool
        The parallelism is found elsewhere: all ranks are of one group, and sizes are 1.
    enable_attention_dp : bool
        Attention runs on whole requests, so ``rank`` may be set to anything.

    Raises
    ------
    ValueError
        If sizes do not fit each other, or the rank is not one of the world.
    NotImplementedError
        For context parallelism together with expert parallelism.

    Notes
    -----
    Source: the class of TensorRT-LLM (Apache-2.0), whose names FlashInfer and engines use.

    Examples
    --------
    >>> from precast.comm import Mapping
    >>> Mapping(8, 5, tp_size=4, pp_size=2).tp_group
    [4, 5, 6, 7]
    >>> Mapping(8, 5, tp_size=4, pp_size=2).pp_group
    [1, 5]
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        cp_config: dict[str, Any] | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ) -> None:
        positive = {
            "world_size": world_size,
            "gpus_per_node": gpus_per_node,
            "cp_size": cp_size,
            "tp_size": tp_size,
            "pp_size": pp_size,
        }
        for name, size in positive.items():
            if size < 1:
                raise ValueError(f"Mapping: {name} must be at least 1, got {size}")
        if auto_parallel:
            if (tp_size, pp_size, cp_size) != (1, 1, 1):
                raise ValueError(
                    f"Mapping: tp_size, pp_size and cp_size must be 1 with auto_parallel, got "
                    f"{tp_size}, {pp_size} and {cp_size}"
                )
        elif tp_size * pp_size * cp_size != world_size:
            raise ValueError(
                f"Mapping: world_size must be tp_size * pp_size * cp_size = {tp_size} * {pp_size} "
                f"* {cp_size}, got {world_size}"
            )
        if moe_cluster_size == -1:
            moe_cluster_size = 1
        if moe_ep_size == -1:
            known = moe_cluster_size * moe_tp_size
            moe_ep_size = 1 if moe_tp_size == -1 else tp_size // max(known, 1)
        if moe_tp_size == -1:
            moe_tp_size = tp_size // max(moe_ep_size * moe_cluster_size, 1)
        if moe_tp_size * moe_ep_size * moe_cluster_size != tp_size:
            raise ValueError(
                f"Mapping: tp_size must be moe_tp_size * moe_ep_size * moe_cluster_size = "
                f"{moe_tp_size} * {moe_ep_size} * {moe_cluster_size}, got {tp_size}"
            )
        if moe_cluster_size > 1 and moe_ep_size != 1:
            raise ValueError(
                f"Mapping: moe_ep_size must be 1 with a moe_cluster_size of {moe_cluster_size}, "
                f"got {moe_ep_size}"
            )
        if attn_cp_size == -1:
            attn_cp_size = 1 if attn_tp_size == -1 else cp_size * tp_size // max(attn_tp_size, 1)
        if attn_tp_size == -1:
            attn_tp_size = cp_size * tp_size // max(attn_cp_size, 1)
        if attn_cp_size != 1:
            raise ValueError(f"Mapping: attn_cp_size must be 1, got {attn_cp_size}")
        if attn_tp_size != tp_size * cp_size:
            raise ValueError(
                f"Mapping: attn_tp_size must be tp_size * cp_size = {tp_size} * {cp_size}, got "
                f"{attn_tp_size}"
            )
        if moe_ep_size != 1 and cp_size > 1:
            raise NotImplementedError(
                f"Mapping: cp_size must be 1 with a moe_ep_size of {moe_ep_size}, got {cp_size}"
            )

        self.world_size = world_size
        self.gpus_per_node = gpus_per_node
        self.cp_size = cp_size
        self.cp_config = cp_config if cp_config is not None else {}
        self.tp_size = tp_size
        self.pp_size = pp_size
        self.moe_tp_size = moe_tp_size
        self.moe_cluster_size = moe_cluster_size
        self.moe_ep_size = moe_ep_size
        self.attn_tp_size = attn_tp_size
        self.attn_cp_size = attn_cp_size
        self.auto_parallel = auto_parallel
        self.enable_attention_dp = enable_attention_dp
        self.rank = rank

        stage = tp_size * cp_size  # ranks of a pipeline stage
        stages = range(0, pp_size * stage, stage)
        self.pp_groups = _lists(range(i, world_size, stage) for i in range(stage))
        self.cp_groups = _lists(
            range(s + j, s + stage + j, tp_size) for s in stages for j in range(tp_size)
        )
        self.tp_groups = _lists(
            range(first, first + tp_size) for first in range(0, pp_size * stage, tp_size)
        )
        # Experts are not divided by context, so a stage has one tensor-parallel group here.
        experts = moe_cluster_size * moe_ep_size
        blocks = range(0, pp_size * tp_size, tp_size)
        self.moe_tp_groups = _lists(
            range(b + j, b + tp_size, experts) for b in blocks for j in range(experts)
        )
        self.moe_cluster_groups = _lists(
            range(b + j * experts, b + j * experts + experts)
            for b in blocks
            for j in range(moe_tp_size)
        )
        self.moe_ep_groups = _lists(
            range(b + j * moe_ep_size, b + (j + 1) * moe_ep_size)
            for b in blocks
            for j in range(moe_tp_size * moe_cluster_size)
        )

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        legal = isinstance(rank, int) and 0 <= rank < self.world_size
        if not self.enable_attention_dp and not legal:
            raise ValueError(f"Mapping: rank must be 0 to {self.world_size - 1}, got {rank}")
        self._rank = rank

    @property
    def tp_rank(self) -> int:
        return 0 if self.auto_parallel else self.rank % self.tp_size

    @property
    def cp_rank(self) -> int:
        return 0 if self.auto_parallel else self.rank // self.tp_size % self.cp_size

    @property
    def pp_rank(self) -> int:
        return 0 if self.auto_parallel else self.rank // (self.tp_size * self.cp_size)

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank // (self.moe_ep_size * self.moe_cluster_size)

    @property
    def moe_cluster_rank(self) -> int:
        return self.tp_rank % self.moe_cluster_size

    @property
    def moe_ep_rank(self) -> int:
        return self.tp_rank % self.moe_ep_size

    @property
    def tp_group(self) -> list[int]:
        return self.tp_groups[self.pp_rank * self.cp_size + self.cp_rank]

    @property
    def cp_group(self) -> list[int]:
        return self.cp_groups[self.pp_rank * self.tp_size + self.tp_rank]

    @property
    def pp_group(self) -> list[int]:
        return self.pp_groups[self.cp_rank * self.tp_size + self.tp_rank]

    @property
    def moe_tp_group(self) -> list[int]:
        experts = self.moe_cluster_size * self.moe_ep_size
        inside = self.moe_cluster_rank * self.moe_ep_size + self.moe_ep_rank
        return self.moe_tp_groups[self.pp_rank * experts + inside]

    @property
    def moe_cluster_group(self) -> list[int]:
        return self.moe_cluster_groups[self.pp_rank * self.moe_tp_size + self.moe_tp_rank]

    @property
    def moe_ep_group(self) -> list[int]:
        inside = self.moe_tp_rank * self.moe_cluster_size + self.moe_cluster_rank
        return self.moe_ep_groups[self.pp_rank * self.moe_tp_size * self.moe_cluster_size + inside]

    @property
    def node_rank(self) -> int:
        return self.get_node_rank(self.rank)

    @property
    def local_rank(self) -> int:
        return self.get_local_rank(self.rank)

    def get_node_rank(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.gpus_per_node

    def get_local_rank(self, rank: int) -> int:
        """Return the number of a rank on its host."""
        return rank % self.gpus_per_node

    def is_multi_node(self) -> bool:
        return self.world_size > self.gpus_per_node

    def has_tp(self) -> bool:
        return self.tp_size > 1

    def has_cp(self) -> bool:
        return self.cp_size > 1

    def has_pp(self) -> bool:
        return self.pp_size > 1

    def has_moe_cluster(self) -> bool:
        return self.moe_cluster_size > 1

    def has_moe_tp(self) -> bool:
        return self.moe_tp_size > 1

    def has_moe_ep(self) -> bool:
        return self.moe_ep_size > 1

    def is_first_pp_rank(self) -> bool:
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def is_second_last_pp_rank(self) -> bool:
        return self.pp_rank == self.pp_size - 2

    def prev_pp_rank(self) -> int:
        """Return the rank of the stage before; of the last stage for the first one."""
        return (self.rank - self.tp_size * self.cp_size) % self.world_size

    def next_pp_rank(self) -> int:
        """Return the rank of the stage after; of the first stage for the last one."""
        return (self.rank + self.tp_size * self.cp_size) % self.world_size

    def pp_layers(self, num_layers: int) -> list[int]:
        """Return the layers of this stage; the first stages have one more if they do not divide."""
        least, more = divmod(num_layers, self.pp_size)
        first = self.pp_rank * least + min(self.pp_rank, more)
        return [*range(first, first + least + (self.pp_rank < more))]

    def ep_experts(self, num_experts: int) -> list[int]:
        """Return the experts of this rank, ``num_experts // moe_ep_size`` of them."""
        if self.cp_size != 1:
            raise ValueError(f"ep_experts: cp_size must be 1, got {self.cp_size}")
        count = num_experts // self.moe_ep_size
        return [*range(self.moe_ep_rank * count, (self.moe_ep_rank + 1) * count)]

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that make this mapping again."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_dict(cls, mapping: dict[str, Any]) -> Mapping:
        """Return the mapping of :meth:`to_dict`."""
        return cls(**mapping)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.to_dict().values()))


def _lists(groups: Iterable[range]) -> list[list[int]]:
    return [[*group] for group in groups]
