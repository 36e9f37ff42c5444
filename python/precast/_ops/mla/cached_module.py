# SPDX-License-Identifier: Apache-2.0
"""``wrapper._cached_module.plan(...)`` of MLA, which engines call with nine arguments."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from precast._base.errors import PlanMismatchError
from precast._ops.attention.cached_module import CachedModule
from precast._ops.attention.lengths import total_and_longest

#: What engines pass, in their order.
_Given = namedtuple(
    "_Given",
    "float_workspace int_workspace pinned_workspace qo_indptr kv_indptr kv_len num_heads "
    "head_dim_ckv causal",
)


class MLACachedModule(CachedModule):
    """Plans for its wrapper; engines store what :meth:`plan` returns in ``wrapper._plan_info``."""

    def plan(self, *args: Any) -> list[int]:
        """Plan by position.

        Parameters
        ----------
        *args
            Float, int and pinned workspace, ``qo_indptr``, ``kv_indptr``, KV lengths, heads,
            ``head_dim_ckv``, ``causal``. The pages are those that the wrapper shows.

        Returns
        -------
        list of int
            Rows of a tile, ``causal`` and ``window_left`` of the plan.

        Raises
        ------
        TypeError
            Another number of arguments.
        """
        if len(args) != len(_Given._fields):
            raise TypeError(
                f"_cached_module.plan: takes {len(_Given._fields)} arguments, got {len(args)}"
            )
        wrapper, before = self._wrapper, self._wrapper._plan
        wrapper._check_planned("_cached_module.plan")
        given = _Given(*args)
        sizes = given.num_heads, given.head_dim_ckv
        planned = before.shape.num_qo_heads, before.shape.head_dim_vo
        if sizes != planned:
            raise PlanMismatchError(
                f"_cached_module.plan: heads and head_dim_ckv must be {[*planned]} as in plan(), "
                f"got {[*sizes]}. Fix: call plan()"
            )
        # The tables that the wrapper shows stay: they are the engine's to set.
        names = ("qo_indptr", "kv_indptr", "kv_len")
        tables = {name: wrapper._on_device(getattr(given, name), False) for name in names}
        tokens = q_len = None
        if not given.qo_indptr.is_cuda:
            tokens, q_len = total_and_longest(given.qo_indptr)
        shape = before.shape._replace(
            batch_size=given.kv_len.shape[0],
            rows=-1 if tokens is None else tokens,
            causal=given.causal,
        )
        shape = wrapper._with_tile(before.model, shape, q_len, tokens)
        plan = before._replace(
            shape=shape,
            scores=before.scores._replace(causal=given.causal),
            int_workspace=given.int_workspace,
            float_workspace=given.float_workspace,
        )
        return self._launch_and_keep(wrapper, plan, before.tables._replace(**tables))
