# SPDX-License-Identifier: Apache-2.0
"""What the plans of both prefill wrappers have in common.

Source: Osama et al., Stream-K, arXiv:2301.03598.
"""

from __future__ import annotations

from typing import TypeAlias

from precast._base.torch import torch
from precast._ops.attention import kernels
from precast._ops.attention.prefill._masks import byte_bounds, check_mask_size, packed
from precast._ops.attention.reference import CAUSAL, CUSTOM, MULTI_ITEM, NON_CAUSAL
from precast._ops.attention.wrapper import PLAN_TABLES, AttentionWrapper

Dtype: TypeAlias = "torch.dtype | str | None"


class PrefillPlan(AttentionWrapper):
    """Lengths of queries, masks, and the launch of a plan."""

    _qo_indptr_buf: torch.Tensor | None
    _max_total_num_rows: int | None = None
    _qo_indptr_last: int | None = None
    _masked = False
    _causal = False

    def _keep_rows(self, qo_indptr: torch.Tensor, batch_size: int, max_q_len: int | None) -> None:
        """Queries of the batch and of its longest request, as far as the host knows them."""
        rows = None if qo_indptr.is_cuda else int(qo_indptr[-1])
        if self._use_cuda_graph:
            self._check_frozen(batch_size, rows)
        if max_q_len is None and rows is not None:
            max_q_len = int(qo_indptr.diff().max()) if batch_size else 0
        self._planned_rows = self._qo_indptr_last = rows
        self._max_q_len = max_q_len

    def _check_frozen(self, batch_size: int, rows: int | None) -> None:
        """What CUDA graphs hold fast."""
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"{self._name}: The batch size should be fixed during the lifecycle of the wrapper "
                f"in cuda graph mode: it is {batch_size} and was {self._fixed_batch_size} when "
                f"the wrapper was made"
            )
        most = self._max_total_num_rows
        if rows is not None and most is not None and rows > most:
            raise ValueError(
                f"{self._name}: The total number of rows in qo_indptr {rows} in cuda graph mode "
                f"cannot exceed the number of rows set during initialization {most}, that of the "
                f"first plan"
            )
        if most is None:
            self._max_total_num_rows = rows

    def _keep_mask(
        self,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        sizes: torch.Tensor | None,
        non_blocking: bool,
    ) -> None:
        """Pack the mask, if there is one; into the buffers under CUDA graphs."""
        self._masked = sizes is not None
        if sizes is None:
            if not self._use_cuda_graph:
                self._custom_mask_buf = self._mask_indptr_buf = None
            return
        bytes_of, starts_of = self._custom_mask_buf, self._mask_indptr_buf
        if self._use_cuda_graph:
            for name, buffer in (("custom_mask_buf", bytes_of), ("mask_indptr_buf", starts_of)):
                if not isinstance(buffer, torch.Tensor):
                    raise ValueError(
                        f"{name} must be initialized with a torch.Tensor in cuda graph mode if we "
                        f"use custom mask in attention computation."
                    )
            assert bytes_of is not None
            assert starts_of is not None
        self._check_mask(custom_mask, packed_custom_mask, sizes)
        self._overwritten = self._use_cuda_graph
        if packed_custom_mask is not None:
            bits, starts = packed_custom_mask, byte_bounds(sizes)
        else:
            assert custom_mask is not None
            mask = custom_mask.to(self.device, non_blocking=non_blocking)
            bits, starts = packed(mask, sizes, bytes_of if self._use_cuda_graph else None)
        if not self._use_cuda_graph:
            self._custom_mask_buf = bits.to(self.device, non_blocking=non_blocking)
            self._mask_indptr_buf = self._on_device(starts, non_blocking)
            return
        assert bytes_of is not None
        assert starts_of is not None
        if bits.data_ptr() != bytes_of.data_ptr():
            # Why: what a part comes from may change before a copy that nobody waits for.
            whole = bits.numel() == bytes_of.numel()
            bytes_of[: bits.numel()].copy_(bits, non_blocking=non_blocking and whole)
        starts_of.copy_(starts, non_blocking=non_blocking)

    def _check_mask(
        self,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        sizes: torch.Tensor,
    ) -> None:
        """A mask for all pairs, and a buffer for it; lengths on the device are not waited for."""
        name = f"{self._name}.plan"
        needed = None
        if not sizes.is_cuda:
            needed = int(((sizes + 7) // 8).sum())
            if packed_custom_mask is not None:
                check_mask_size(name, "packed_custom_mask", packed_custom_mask, needed)
            elif custom_mask is not None:
                check_mask_size(name, "custom_mask", custom_mask, int(sizes.sum()))
        if self._use_cuda_graph and self._custom_mask_buf is not None:
            starts, bounds = self._mask_indptr_buf, sizes.shape[0] + 1
            if starts is not None and starts.shape != (bounds,):
                raise ValueError(
                    f"{name}: mask_indptr_buf must have shape [{bounds}], got {[*starts.shape]}"
                )
            if packed_custom_mask is not None:
                needed = packed_custom_mask.numel()
            if needed is not None:
                check_mask_size(name, "custom_mask_buf", self._custom_mask_buf, needed)

    def _check_split_of(
        self,
        lengths: tuple[torch.Tensor | None, ...],
        batch_size: int,
        page_size: int,
        head_dim_qk: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int | None,
        disable_split_kv: bool,
    ) -> None:
        """Room for parts of a fixed size, if all lengths are on the host."""
        if fixed_split_size is None or fixed_split_size <= 0:
            return
        if any(tensor is not None and tensor.is_cuda for tensor in lengths):
            return
        self._check_split(
            lengths,
            batch_size,
            0,
            page_size,
            head_dim_qk,
            self._choose_tile(self._max_q_len, self._qo_indptr_last, True),
            causal,
            window_left,
            fixed_split_size,
            disable_split_kv,
        )

    def _keep_items(
        self,
        prefix_len_ptr: torch.Tensor | None,
        token_pos_in_items_ptr: torch.Tensor | None,
        token_pos_in_items_len: int,
        max_item_len_ptr: torch.Tensor | None,
    ) -> None:
        """Where items begin, in the integers that the kernels read."""
        if prefix_len_ptr is None:
            self._prefix_len_ptr = self._token_pos_in_items_ptr = self._max_item_len_ptr = None
            self._token_pos_in_items_len = 0
            self._overwritten = self._use_cuda_graph  # What comes next writes buffers.
            return
        if token_pos_in_items_ptr is None:
            raise ValueError(
                f"{self._name}.plan: token_pos_in_items_ptr must be a torch.Tensor where "
                f"prefix_len_ptr is one, got None"
            )
        self._prefix_len_ptr = self._as(prefix_len_ptr, torch.uint32)
        self._token_pos_in_items_ptr = self._as(token_pos_in_items_ptr, torch.uint16)
        self._token_pos_in_items_len = token_pos_in_items_len or token_pos_in_items_ptr.numel()
        self._max_item_len_ptr = (
            None if max_item_len_ptr is None else self._as(max_item_len_ptr, torch.uint16)
        )
        self._overwritten = self._use_cuda_graph

    def _as(self, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        numbers = numbers.to(self.device)
        return numbers if numbers.dtype == dtype else numbers.to(dtype)

    def _launch_plan(
        self,
        tables: tuple[torch.Tensor | None, ...],
        batch_size: int,
        page_size: int,
        head_dim_qk: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int | None,
        disable_split_kv: bool,
    ) -> None:
        invariant = disable_split_kv or (fixed_split_size or -1) > 0
        tile_rows = self._choose_tile(self._max_q_len, self._qo_indptr_last, invariant)
        items = self._prefix_len_ptr is not None
        causal = items or (causal and not self._masked)
        export = kernels.plan if len(tables) == PLAN_TABLES else kernels.fill_and_plan
        export[self._device_key](
            *tables,
            self._int_workspace_buffer,
            self._float_workspace_buffer,
            batch_size,
            0,
            page_size,
            self._num_qo_heads,
            self._num_kv_heads,
            head_dim_qk,
            self._head_dim_vo,
            self._cached_kv_data_type.itemsize,
            tile_rows,
            causal,
            window_left,
            fixed_split_size or -1,
            disable_split_kv,
            True,
        )
        self._overwritten = True
        self._plan_info = [tile_rows, int(causal), window_left]
        self._batch_size = batch_size
        self._page_size = page_size

    def _keep(
        self,
        causal: bool,
        pos_encoding_mode: str,
        use_fp16_qk_reduction: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        self._causal = causal
        self._pos_encoding_mode = pos_encoding_mode
        self._use_fp16_qk_reduction = use_fp16_qk_reduction
        self._window_left = window_left
        self._logits_soft_cap = logits_soft_cap or 0.0
        self._sm_scale = sm_scale
        self._rope_scale = rope_scale
        self._rope_theta = rope_theta

    def _rewind(
        self,
        causal: bool,
        pos_encoding_mode: str,
        use_fp16_qk_reduction: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        """Options of forward() in the place of those of the plan."""
        free = self._masked or self._prefix_len_ptr is not None
        self._check_wider(window_left, None if free else causal)
        self._check_positions(pos_encoding_mode, rope_scale, rope_theta)
        self._keep(
            causal,
            pos_encoding_mode,
            use_fp16_qk_reduction,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
        )

    def _mask_mode(self) -> int:
        if self._prefix_len_ptr is not None:
            return MULTI_ITEM
        if self._masked:
            return CUSTOM
        return CAUSAL if self._causal else NON_CAUSAL

    def _check_rows(self, tokens: int) -> None:
        raise ValueError(
            f"q.shape[0] ({tokens}) does not match qo_indptr[-1] ({self._qo_indptr_last}). For "
            f"{self._name}, q must have shape [total_tokens, num_heads, head_dim] where "
            f"total_tokens = qo_indptr[-1]."
        )
