# SPDX-License-Identifier: Apache-2.0
"""What the plans of both prefill wrappers have in common.

Source: Osama et al., Stream-K, arXiv:2301.03598.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from precast._base.torch import torch
from precast._ops.attention import validation
from precast._ops.attention.plan import (
    NO_ITEMS,
    NO_MASK,
    AttentionPlan,
    Hints,
    Items,
    Mask,
    PlanShape,
    Scores,
    Tables,
)
from precast._ops.attention.prefill.masks import byte_bounds, check_mask_size, packed
from precast._ops.attention.wrapper import AttentionWrapper

Dtype: TypeAlias = "torch.dtype | str | None"


class PrefillCall(NamedTuple):
    """The arguments of ``plan()`` of either wrapper."""

    lengths: Tables
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    page_size: int
    dtypes: tuple[Any, Any, Any]
    scores: Scores
    #: Bool, packed, and how many pairs of a query and a key each request has; None without a mask.
    mask: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    items: Items
    max_q_len: int | None
    max_kv_len: int | None
    is_uniform: bool
    block_tables: torch.Tensor | None
    fixed_split_size: int | None
    disable_split_kv: bool
    non_blocking: bool


class PrefillPlan(AttentionWrapper):
    """Lengths of queries, masks, and the plan of a batch."""

    @property
    def _qo_indptr_last(self) -> int | None:
        """Queries of the batch; None if the host does not know them."""
        rows = self._plan.shape.rows
        return None if rows < 0 else rows

    def _plan_batch(self, call: PrefillCall) -> None:
        """Check a call and make its plan."""
        name, scores, lengths = f"{self._name}.plan", call.scores, call.lengths
        qo_indptr = lengths.qo_indptr
        assert qo_indptr is not None
        validation.check_rope(name, scores.rope_scale, scores.rope_theta)
        model = self._model(call.heads, call.head_dims, scores.pos_encoding_mode, call.dtypes)
        batch_size, max_q_len = qo_indptr.shape[0] - 1, call.max_q_len
        rows = None if qo_indptr.is_cuda else int(qo_indptr[-1])
        most_rows = self._max_total_num_rows
        if self._use_cuda_graph:
            self._check_frozen(batch_size, rows, lengths.kv_indices)
            most_rows = rows if most_rows is None else most_rows
        if max_q_len is None and rows is not None:
            max_q_len = int(qo_indptr.diff().max()) if batch_size else 0
        items = self._items(call.items)
        is_masked = call.mask[-1] is not None
        split = call.fixed_split_size or -1
        invariant = call.disable_split_kv or split > 0
        shape = PlanShape(
            batch_size,
            -1 if rows is None else rows,
            0,
            call.page_size,
            *call.heads,
            *call.head_dims,
            model.kv_dtype.itemsize,
            self._choose_tile(call.heads, call.head_dims, max_q_len, rows, invariant),
            items.prefix_len is not None or (scores.causal and not is_masked),
            scores.window_left,
            split,
            call.disable_split_kv,
        )
        self._check_split(shape, lengths._replace(kv_indices=None))
        mask, fill = self._mask(*call.mask, call.non_blocking)
        plan = AttentionPlan(
            model,
            shape,
            scores,
            self._tables(lengths, call.non_blocking),
            mask,
            items,
            Hints(
                max_q_len,
                call.max_kv_len,
                most_rows,
                call.block_tables,
                # A graph may run by a later plan with fewer queries, but not where all have as
                # many.
                self._use_cuda_graph and not call.is_uniform,
            ),
            self._plan.hnd,
            self._int_workspace_buffer,
            self._float_workspace_buffer,
        )
        self._launch(plan, lengths, call.non_blocking, fill)

    def _tables(self, given: Tables, non_blocking: bool) -> Tables:
        """The buffers of a CUDA graph, or ``given`` on the device."""
        if self._use_cuda_graph:
            return self._plan.tables
        return Tables(*(None if t is None else self._on_device(t, non_blocking) for t in given))

    def _check_frozen(
        self, batch_size: int, rows: int | None, kv_indices: torch.Tensor | None
    ) -> None:
        """Sizes that CUDA graphs hold fast."""
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
        buffer = self._plan.tables.kv_indices
        if kv_indices is not None and buffer is not None and len(kv_indices) > len(buffer):
            raise ValueError(
                f"{self._name}: The length of paged_kv_indices exceeds the allocated buffer size: "
                f"{len(kv_indices)} and {len(buffer)}"
            )

    def _mask(
        self,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        sizes: torch.Tensor | None,
        non_blocking: bool,
    ) -> tuple[Mask, Callable[[], None] | None]:
        """The bits of the mask, and under CUDA graphs what writes them into the buffers."""
        held = self._plan.mask
        if sizes is None:
            return (held._replace(is_used=False) if self._use_cuda_graph else NO_MASK), None
        if self._use_cuda_graph:
            for name, buffer in zip(("custom_mask_buf", "mask_indptr_buf"), held):
                if not isinstance(buffer, torch.Tensor):
                    raise ValueError(
                        f"{name} must be initialized with a torch.Tensor in cuda graph mode if we "
                        f"use custom mask in attention computation."
                    )
        self._check_mask(custom_mask, packed_custom_mask, sizes)

        def bits_into(buffer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if packed_custom_mask is not None:
                return packed_custom_mask, byte_bounds(sizes)
            assert custom_mask is not None
            return packed(custom_mask.to(self.device, non_blocking=non_blocking), sizes, buffer)

        if not self._use_cuda_graph:
            bits, starts = bits_into(None)
            bits = bits.to(self.device, non_blocking=non_blocking)
            return Mask(bits, self._on_device(starts, non_blocking), True), None
        return held._replace(is_used=True), lambda: _fill(held, *bits_into(held.bits), non_blocking)

    def _check_mask(
        self,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        sizes: torch.Tensor,
    ) -> None:
        """A mask for all pairs, and a buffer for it; lengths on the device are not waited for."""
        name, buffers = f"{self._name}.plan", self._plan.mask
        needed = None
        if not sizes.is_cuda:
            needed = int(((sizes + 7) // 8).sum())
            if packed_custom_mask is not None:
                check_mask_size(name, "packed_custom_mask", packed_custom_mask, needed)
            elif custom_mask is not None:
                check_mask_size(name, "custom_mask", custom_mask, int(sizes.sum()))
        if self._use_cuda_graph and buffers.bits is not None:
            starts, bounds = buffers.indptr, sizes.shape[0] + 1
            if starts is not None and starts.shape != (bounds,):
                raise ValueError(
                    f"{name}: mask_indptr_buf must have shape [{bounds}], got {[*starts.shape]}"
                )
            if packed_custom_mask is not None:
                needed = packed_custom_mask.numel()
            if needed is not None:
                check_mask_size(name, "custom_mask_buf", buffers.bits, needed)

    def _items(self, given: Items) -> Items:
        """Where items begin, in the integers that the kernels read."""
        if given.prefix_len is None:
            return NO_ITEMS
        if given.token_pos is None:
            raise ValueError(
                f"{self._name}.plan: token_pos_in_items_ptr must be a torch.Tensor where "
                f"prefix_len_ptr is one, got None"
            )
        longest = given.max_item_len
        return Items(
            given.prefix_len.to(self.device).to(torch.uint32),
            given.token_pos.to(self.device).to(torch.uint16),
            given.token_pos_len or given.token_pos.numel(),
            None if longest is None else longest.to(self.device).to(torch.uint16),
        )

    def _take_options(self, scores: Scores) -> None:
        """Options of forward() in the place of those of the plan."""
        free = self._plan.mask.is_used or self._plan.items.prefix_len is not None
        self._take_scores(scores, None if free else scores.causal)

    def _raise_rows(self, tokens: int) -> None:
        raise ValueError(
            f"q.shape[0] ({tokens}) does not match qo_indptr[-1] ({self._qo_indptr_last}). For "
            f"{self._name}, q must have shape [total_tokens, num_heads, head_dim] where "
            f"total_tokens = qo_indptr[-1]."
        )


def _fill(held: Mask, bits: torch.Tensor, starts: torch.Tensor, non_blocking: bool) -> None:
    """Write a packed mask into the buffers of a CUDA graph."""
    assert held.bits is not None
    assert held.indptr is not None
    if bits.data_ptr() != held.bits.data_ptr():
        # Why: what a part comes from may change before a copy that nobody waits for.
        whole = bits.numel() == held.bits.numel()
        held.bits[: bits.numel()].copy_(bits, non_blocking=non_blocking and whole)
    held.indptr.copy_(starts, non_blocking=non_blocking)
