# SPDX-License-Identifier: Apache-2.0
"""``wrapper._cached_module.plan(...)``, which engines call with positional arguments of their own.

They plan past ``plan()`` to save its copies: with the workspaces, lengths on the host, and options,
in the order that FlashInfer's modules take them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from precast._base.errors import PlanMismatchError
from precast._base.torch import torch
from precast._ops.attention import kernels
from precast._ops.attention.reference import NON_CAUSAL

if TYPE_CHECKING:
    from precast._ops.attention.wrapper import AttentionWrapper

_DECODE_ARGUMENTS = 15
_PREFILL_ARGUMENTS = (16, 18, 19, 20)


class CachedModule:
    """Plans for its wrapper; what :meth:`plan` returns belongs into ``wrapper._plan_info``."""

    def __init__(self, wrapper: AttentionWrapper) -> None:
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
            What ``run()`` needs to know of the plan.

        Raises
        ------
        TypeError
            Another number of arguments.
        """
        if len(args) == _DECODE_ARGUMENTS:
            return self._plan_decode(*args)
        if len(args) in _PREFILL_ARGUMENTS:
            return self._plan_prefill(*args)
        legal = ", ".join(map(str, (_DECODE_ARGUMENTS, *_PREFILL_ARGUMENTS)))
        raise TypeError(f"_cached_module.plan: takes {legal} arguments, got {len(args)}")

    def _plan_decode(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned: object,
        indptr: torch.Tensor,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        use_cuda_graph: bool,
        window_left: int,
        logits_soft_cap: float,
        head_dim_qk: int,
        head_dim_vo: int,
        *dtypes: torch.Tensor,
    ) -> list[int]:
        wrapper: Any = self._wrapper
        self._check(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        tile_rows = wrapper._choose_tile(1)
        kernels.plan[wrapper._device_key](
            None,
            wrapper._on_device(indptr, False),
            wrapper._paged_kv_last_page_len_buf,
            None,
            int_workspace,
            float_workspace,
            batch_size,
            1,
            page_size,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            wrapper._cached_kv_data_type.itemsize,
            tile_rows,
            False,
            window_left,
            -1,
            False,
            True,
        )
        wrapper._batch_size = wrapper._planned_rows = batch_size
        wrapper._q_len_per_req, wrapper._mask_mode = 1, NON_CAUSAL
        wrapper._page_size = page_size
        return [tile_rows, 0, window_left]

    def _plan_prefill(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned: object,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        use_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int | None = -1,
        disable_split_kv: bool = False,
        num_colocated_ctas: int = 0,
        uniform_q_len: int = 0,
    ) -> list[int]:
        wrapper: Any = self._wrapper
        self._check(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        q_len = uniform_q_len or None
        if q_len is None and not qo_indptr.is_cuda:
            q_len = int((qo_indptr[1:] - qo_indptr[:-1]).max()) if batch_size else 0
        batch_invariant = disable_split_kv or (fixed_split_size or -1) > 0
        tile_rows = wrapper._choose_tile(q_len, total_num_rows, batch_invariant)
        kernels.plan[wrapper._device_key](
            wrapper._on_device(qo_indptr, False),
            wrapper._on_device(kv_indptr, False),
            None,
            wrapper._on_device(kv_lens, False),
            int_workspace,
            float_workspace,
            batch_size,
            0,
            page_size,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            wrapper._cached_kv_data_type.itemsize,
            tile_rows,
            causal,
            window_left,
            fixed_split_size or -1,
            disable_split_kv,
            True,
        )
        wrapper._batch_size = batch_size
        wrapper._planned_rows = None  # Rows may be a bound.
        if wrapper._page_size:  # Without pages engines say 1.
            wrapper._page_size = page_size
        return [tile_rows, int(causal), window_left]

    def _check(self, num_qo_heads: int, num_kv_heads: int, *head_dims: int) -> None:
        """Heads are those of plan(), which has chosen the kernels."""
        wrapper: Any = self._wrapper
        if wrapper._cached_q_data_type is None:
            raise PlanMismatchError("_cached_module.plan: there is no plan. Fix: call plan() first")
        planned = wrapper._num_qo_heads, wrapper._num_kv_heads, *wrapper._run_key[2:4]
        given = num_qo_heads, num_kv_heads, *head_dims
        if given != planned:
            raise PlanMismatchError(
                f"_cached_module.plan: query heads, KV heads and head dimensions must be "
                f"{[*planned]} as in plan(), got {[*given]}. Fix: call plan()"
            )
