# SPDX-License-Identifier: Apache-2.0
"""``wrapper._cached_module.plan(...)``, which engines call with positional arguments of their own.

They plan past ``plan()`` to save its copies: with the workspaces, lengths on the host, and options,
in the order that FlashInfer's modules take them.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from precast._base.errors import PlanMismatchError
from precast._ops.attention import kernels
from precast._ops.attention.lengths import total_and_longest
from precast._ops.attention.plan import NO_TABLES, AttentionPlan, Tables

#: What engines pass of a decode, in their order.
Decode = namedtuple(
    "Decode",
    "float_workspace int_workspace pinned_workspace kv_indptr batch_size num_qo_heads num_kv_heads "
    "page_size use_cuda_graph window_left logits_soft_cap head_dim_qk head_dim_vo q_dtype_like "
    "kv_dtype_like causal fixed_split_size disable_split_kv",
    defaults=(False, -1, False),  # That is what decode has; it takes none of them.
)
#: What engines pass of a prefill, in their order.
Prefill = namedtuple(
    "Prefill",
    "float_workspace int_workspace pinned_workspace qo_indptr kv_indptr kv_len total_num_rows "
    "batch_size num_qo_heads num_kv_heads page_size use_cuda_graph head_dim_qk head_dim_vo causal "
    "window_left fixed_split_size disable_split_kv num_colocated_ctas uniform_q_len",
    defaults=(-1, False, 0, 0),
)
_DECODE_COUNT, _PREFILL_COUNTS = 15, (16, 18, 19, 20)


class CachedModule:
    """Plans for its wrapper; engines store what :meth:`plan` returns in ``wrapper._plan_info``."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper  # An AttentionWrapper, whose module imports this one.

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
        is_decode = len(args) == _DECODE_COUNT
        if not is_decode and len(args) not in _PREFILL_COUNTS:
            legal = ", ".join(map(str, (_DECODE_COUNT, *_PREFILL_COUNTS)))
            raise TypeError(f"_cached_module.plan: takes {legal} arguments, got {len(args)}")
        wrapper, before = self._wrapper, self._wrapper._plan
        wrapper._check_planned("_cached_module.plan")
        given: Any = Decode(*args) if is_decode else Prefill(*args)
        heads = given.num_qo_heads, given.num_kv_heads
        head_dims = given.head_dim_qk, given.head_dim_vo
        sizes, planned = (*heads, *head_dims), before.shape[4:8]
        if sizes != planned:
            raise PlanMismatchError(
                f"_cached_module.plan: query heads, KV heads and head dimensions must be "
                f"{[*planned]} as in plan(), got {[*sizes]}. Fix: call plan()"
            )
        # The tables that the wrapper shows stay: they are the engine's to set.
        tables = {"kv_indptr": wrapper._on_device(given.kv_indptr, False)}
        q_len: int | None = 1
        tokens = None
        if not is_decode:
            tables["qo_indptr"] = wrapper._on_device(given.qo_indptr, False)
            tables["kv_len"] = wrapper._on_device(given.kv_len, False)
            q_len, tokens = given.uniform_q_len or None, given.total_num_rows
            if q_len is None and not given.qo_indptr.is_cuda:
                q_len = total_and_longest(given.qo_indptr)[1]
        split = given.fixed_split_size or -1
        causal, window_left = given.causal and not before.mask.is_used, given.window_left
        shape = before.shape._replace(
            batch_size=given.batch_size,
            rows=given.batch_size if is_decode else -1,
            q_len_per_req=int(is_decode),
            page_size=given.page_size if before.shape.page_size else 0,  # Engines say 1 there.
            causal=causal,
            window_left=window_left,
            fixed_split_size=split,
            disable_split_kv=given.disable_split_kv,
        )
        shape = wrapper._with_tile(before.model, shape, q_len, tokens)
        # Engines set the options of scores behind this call; until then they fit the plan.
        scores = before.scores._replace(causal=not is_decode and (causal or before.scores.causal))
        if window_left >= 0:
            scores = scores._replace(window_left=window_left)
        plan = before._replace(
            shape=shape,
            scores=scores,
            int_workspace=given.int_workspace,
            float_workspace=given.float_workspace,
        )
        return self._launch_and_keep(wrapper, plan, before.tables._replace(**tables))

    @staticmethod
    def _launch_and_keep(wrapper: Any, plan: AttentionPlan, tables: Tables) -> list[int]:
        """Divide the work, and let the wrapper's runs use it; what engines keep of a plan."""
        packed = kernels.pack(plan, tables)
        kernels.launch(packed, NO_TABLES)
        if wrapper._use_cuda_graph:  # The next plan's lengths are those of the buffers again.
            packed = packed._replace(block=None)
        wrapper._keep(packed)
        info: list[int] = wrapper._plan_info
        return info
