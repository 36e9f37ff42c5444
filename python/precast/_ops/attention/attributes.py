# SPDX-License-Identifier: Apache-2.0
"""The attributes of a wrapper that engines read, and some of them set; they lie in its plan."""

from __future__ import annotations

from typing import Any

from precast._base.errors import PlanMismatchError
from precast._base.torch import torch
from precast._ops.attention.plan import AttentionPlan


class PlanField:
    """An attribute of a wrapper that lies in its plan; engines read it, and some of them set it.

    A value that differs makes another plan, whose params block the next run packs.
    """

    def __init__(self, group: str, name: str) -> None:
        self._group, self._name = group, name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        return getattr(getattr(wrapper._plan, self._group), self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        group = getattr(wrapper._plan, self._group)
        before = getattr(group, self._name)
        is_tensor = isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor)
        if value is before or (not is_tensor and value == before):
            return
        changed = {self._group: group._replace(**{self._name: value})}
        wrapper._plan = wrapper._plan._replace(block=None, **changed)


class PlanAttributes:
    """Give a plan the names that engines use."""

    _plan: AttentionPlan

    _cached_q_data_type = PlanField("model", "q_dtype")
    _cached_kv_data_type = PlanField("model", "kv_dtype")
    _cached_o_data_type = PlanField("model", "o_dtype")
    _batch_size = PlanField("shape", "batch_size")
    _num_qo_heads = PlanField("shape", "num_qo_heads")
    _num_kv_heads = PlanField("shape", "num_kv_heads")
    _page_size = PlanField("shape", "page_size")
    _causal = PlanField("scores", "causal")
    _window_left = PlanField("scores", "window_left")
    _logits_soft_cap = PlanField("scores", "logits_soft_cap")
    _sm_scale = PlanField("scores", "sm_scale")
    _pos_encoding_mode = PlanField("scores", "pos_encoding_mode")
    _rope_scale = PlanField("scores", "rope_scale")
    _rope_theta = PlanField("scores", "rope_theta")
    _use_fp16_qk_reduction = PlanField("scores", "use_fp16_qk_reduction")
    _qo_indptr_buf = PlanField("tables", "qo_indptr")
    _custom_mask_buf = PlanField("mask", "bits")
    _mask_indptr_buf = PlanField("mask", "indptr")
    _prefix_len_ptr = PlanField("items", "prefix_len")
    _token_pos_in_items_ptr = PlanField("items", "token_pos")
    _token_pos_in_items_len = PlanField("items", "token_pos_len")
    _max_item_len_ptr = PlanField("items", "max_item_len")
    _max_q_len = PlanField("hints", "max_q_len")
    _max_kv_len = PlanField("hints", "max_kv_len")
    _max_total_num_rows = PlanField("hints", "max_total_num_rows")
    _block_tables = PlanField("hints", "block_tables")

    @property
    def _plan_info(self) -> list[int] | None:
        """Rows of a tile, ``causal`` and ``window_left`` of the plan; None if there is none."""
        shape = self._plan.shape
        if not self._plan.is_launched:
            return None
        return [shape.block_m, int(shape.causal), shape.window_left]

    @_plan_info.setter
    def _plan_info(self, info: list[int] | None) -> None:
        # Engines store here what _cached_module.plan() returned, which has kept its plan itself.
        if info is None:
            self._forget_plan()

    def _forget_plan(self) -> None:
        """Make the next run say that there is no plan."""
        self._plan = self._plan._replace(block=None, is_launched=False)

    def _check_planned(self, method: str) -> None:
        if not self._plan.is_launched:
            raise PlanMismatchError(f"{method}: there is no plan. Fix: call plan() first")
