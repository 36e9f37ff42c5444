# SPDX-License-Identifier: Apache-2.0
"""``wrapper._cached_module.plan(...)``, which engines call with positional arguments of their own.

They plan past ``plan()`` to save its copies: with the workspaces, lengths on the host, and options,
in the order that FlashInfer's modules take them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from precast._base.errors import PlanMismatchError
from precast._base.torch import torch
from precast._ops.attention import kernels
from precast._ops.attention.plan import NO_TABLES, AttentionPlan, Tables

_DECODE_ARGUMENTS = 15
_PREFILL_ARGUMENTS = (16, 18, 19, 20)


class PrefillArguments(NamedTuple):
    """What engines pass of a prefill, in their order."""

    float_workspace: torch.Tensor
    int_workspace: torch.Tensor
    pinned_workspace: object
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_len: torch.Tensor
    total_num_rows: int
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    use_cuda_graph: bool
    head_dim_qk: int
    head_dim_vo: int
    causal: bool
    window_left: int
    fixed_split_size: int | None = -1
    disable_split_kv: bool = False
    num_colocated_ctas: int = 0
    uniform_q_len: int = 0


class DecodeArguments(NamedTuple):
    """What engines pass of a decode, in their order."""

    float_workspace: torch.Tensor
    int_workspace: torch.Tensor
    pinned_workspace: object
    kv_indptr: torch.Tensor
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    use_cuda_graph: bool
    window_left: int
    logits_soft_cap: float
    head_dim_qk: int
    head_dim_vo: int
    q_dtype_like: torch.Tensor
    kv_dtype_like: torch.Tensor


class Planner(Protocol):
    """What a wrapper lends to its :class:`CachedModule`."""

    _use_cuda_graph: bool
    _plan: AttentionPlan
    _plan_info: list[int] | None

    def _check_planned(self, method: str) -> None: ...
    def _on_device(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor: ...
    def _choose_tile(
        self,
        heads: tuple[int, int],
        head_dims: tuple[int, int],
        q_len: int | None,
        tokens: int | None,
        batch_invariant: bool,
    ) -> int: ...
    def _keep(self, launched: AttentionPlan) -> None: ...


class CachedModule:
    """Plans for its wrapper; what :meth:`plan` returns belongs into ``wrapper._plan_info``."""

    def __init__(self, wrapper: Planner) -> None:
        self._wrapper = wrapper

    def plan(self, *args: Any) -> list[int]:
        """Plan by position.

        Parameters
        ----------
        *args
            Of decode, 15: float, int and pinned workspace, ``indptr``, batch size, query heads,
            KV heads, page size, whether CUDA graphs are on, ``window_left``, ``logits_soft_cap``,
            both head dimensions, an empty tensor of the dtype of queries, one of that of keys.

            Of prefill, 16 to 20: the workspaces, ``qo_indptr``, ``kv_indptr``, KV lengths, rows,
            batch size, query heads, KV heads, page size, whether CUDA graphs are on, both head
            dimensions, ``causal``, ``window_left``, and then if given ``fixed_split_size``,
            ``disable_split_kv``, the number of CTAs that run beside, queries of every request.

        Returns
        -------
        list of int
            Rows of a tile, ``causal`` and ``window_left`` of the plan.

        Raises
        ------
        TypeError
            Another number of arguments.
        """
        if len(args) == _DECODE_ARGUMENTS:
            return self._plan_decode(DecodeArguments(*args))
        if len(args) in _PREFILL_ARGUMENTS:
            return self._plan_prefill(PrefillArguments(*args))
        legal = ", ".join(map(str, (_DECODE_ARGUMENTS, *_PREFILL_ARGUMENTS)))
        raise TypeError(f"_cached_module.plan: takes {legal} arguments, got {len(args)}")

    def _plan_decode(self, given: DecodeArguments) -> list[int]:
        """Of ``_cached_module.plan()`` with the arguments of decode."""
        lengths = self._wrapper._plan.tables._replace(
            kv_indptr=self._wrapper._on_device(given.kv_indptr, False)
        )
        return self._replan(given, lengths, 1, given.batch_size, False, -1, False)

    def _plan_prefill(self, given: PrefillArguments) -> list[int]:
        """Of ``_cached_module.plan()`` with the arguments of prefill."""
        q_len = given.uniform_q_len or None
        if q_len is None and not given.qo_indptr.is_cuda:
            q_len = int(given.qo_indptr.diff().max()) if given.batch_size else 0
        lengths = self._wrapper._plan.tables._replace(
            qo_indptr=self._wrapper._on_device(given.qo_indptr, False),
            kv_indptr=self._wrapper._on_device(given.kv_indptr, False),
            kv_len=self._wrapper._on_device(given.kv_len, False),
        )
        split = given.fixed_split_size or -1
        return self._replan(given, lengths, q_len, -1, given.causal, split, given.disable_split_kv)

    def _replan(
        self,
        given: DecodeArguments | PrefillArguments,
        lengths: Tables,
        q_len: int | None,
        rows: int,
        causal: bool,
        fixed_split_size: int,
        disable_split_kv: bool,
    ) -> list[int]:
        """A plan for other lengths; the tables that the wrapper shows are the engine's to set."""
        self._wrapper._check_planned("_cached_module.plan")
        before = self._wrapper._plan
        heads = given.num_qo_heads, given.num_kv_heads
        sizes = (*heads, given.head_dim_qk, given.head_dim_vo)
        planned = before.shape[4:8]
        if sizes != planned:
            raise PlanMismatchError(
                f"_cached_module.plan: query heads, KV heads and head dimensions must be "
                f"{[*planned]} as in plan(), got {[*sizes]}. Fix: call plan()"
            )
        is_decode = isinstance(given, DecodeArguments)
        tokens = None if isinstance(given, DecodeArguments) else given.total_num_rows
        invariant = disable_split_kv or fixed_split_size > 0
        causal = causal and not before.mask.is_used
        window_left = given.window_left
        shape = before.shape._replace(
            batch_size=given.batch_size,
            rows=rows,
            q_len_per_req=int(is_decode),
            page_size=given.page_size if before.shape.page_size else 0,  # Engines say 1 there.
            block_m=self._wrapper._choose_tile(
                heads, (given.head_dim_qk, given.head_dim_vo), q_len, tokens, invariant
            ),
            causal=causal,
            window_left=window_left,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
        )
        # Engines set the options of scores behind this call; until then they fit the plan.
        scores = before.scores
        scores = scores._replace(
            causal=not is_decode and (causal or scores.causal),
            window_left=scores.window_left if window_left < 0 else window_left,
        )
        plan = before._replace(
            shape=shape,
            scores=scores,
            int_workspace=given.int_workspace,
            float_workspace=given.float_workspace,
        )
        packed = kernels.pack(plan, lengths)
        kernels.launch(packed, NO_TABLES)
        if self._wrapper._use_cuda_graph:  # The next plan's lengths are those of the buffers again.
            packed = packed._replace(block=None)
        self._wrapper._keep(packed)
        assert self._wrapper._plan_info is not None
        return self._wrapper._plan_info
