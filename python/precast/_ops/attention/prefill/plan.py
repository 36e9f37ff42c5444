# SPDX-License-Identifier: Apache-2.0
"""The base class of both prefill wrappers makes their plans.

Source: Osama et al., Stream-K, arXiv:2301.03598.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._ops.attention import validation
from precast._ops.attention.buffers import copy_to_start
from precast._ops.attention.lengths import longest_kv, pairs_of_requests, total_and_longest
from precast._ops.attention.plan import (
    NO_ITEMS,
    NO_MASK,
    Hints,
    Items,
    Mask,
    Model,
    PlanShape,
    Tables,
)
from precast._ops.attention.wrapper import AttentionWrapper, checked_model
from precast._ops.quantize.packbits import segment_packbits

#: Arguments of plan() that only some plans read, or other backends, or whose truth counts.
UNREAD = (
    *("causal", "use_fp16_qk_reduction", "non_blocking", "max_sequence_kv", "uniform_q_len"),
    *("token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr", "seq_lens"),
    *("seq_lens_q", "max_token_per_sequence", "fixed_split_size"),
)
#: Of forward(), whose run reads them from the plan.
FORWARD_UNREAD = ("causal", "use_fp16_qk_reduction", "window_left")


class PrefillPlan(AttentionWrapper):
    """Make the plan of a batch from lengths of queries, masks and options."""

    @property
    def _qo_indptr_last(self) -> int | None:
        """Return the queries of the batch; None if the host does not know them."""
        rows = self._plan.shape.rows
        return None if rows < 0 else rows

    def _shape(self, given: Any, method: str) -> tuple[Model, PlanShape, int | None]:
        """Return the model and the shape of a plan, and its most queries of a request, if known."""
        heads, head_dim_vo = (given.num_qo_heads, given.num_kv_heads), given.head_dim_vo
        head_dims = given.head_dim_qk, given.head_dim_qk if head_dim_vo is None else head_dim_vo
        dtypes = given.q_data_type, given.kv_data_type, given.o_data_type
        positions, index = given.pos_encoding_mode, self._device_index
        model = checked_model(self._name, method, heads, head_dims, positions, dtypes, index)
        indptr, max_q_len = given.qo_indptr, given.max_token_per_sequence or given.uniform_q_len
        batch_size = indptr.shape[0] - 1
        rows = None
        if not indptr.is_cuda:
            rows, max_q_len = total_and_longest(indptr, max_q_len)
        split = given.fixed_split_size or -1
        is_masked = given.custom_mask is not None or given.packed_custom_mask is not None
        shape = PlanShape(
            batch_size,
            -1 if rows is None else rows,
            0,
            given.page_size,
            *heads,
            *head_dims,
            model.kv_bytes,
            0,
            given.prefix_len_ptr is not None or (given.causal and not is_masked),
            given.window_left,
            split,
            given.disable_split_kv,
        )
        shape = self._with_tile(model, shape, max_q_len, rows)
        return model, shape, max_q_len

    def _check_mask_buffers(self) -> None:
        """Raise for a buffer of masks that no plan can use."""
        name, mask = self._name, self._plan.mask
        if mask.bits is not None:
            validation.check_buffer(name, self.device, "custom_mask_buf", mask.bits, torch.uint8)
        if mask.indptr is not None:
            validation.check_buffer(name, self.device, "mask_indptr_buf", mask.indptr, torch.int32)

    def _plan_batch(self, given: Any, lengths: Tables, is_uniform: bool) -> None:
        """Check the arguments of ``plan()`` and make the plan."""
        validation.check_rope(f"{self._name}.plan", given.rope_scale, given.rope_theta)
        sizes, max_kv_len, most_rows = None, given.max_sequence_kv, self._max_total_num_rows
        if given.custom_mask is not None or given.packed_custom_mask is not None:
            sizes = pairs_of_requests(*lengths[:3], given.page_size, given.non_blocking)
        indptr: Any = lengths.kv_indptr
        last, kv_len = lengths.kv_last_page_len, lengths.kv_len
        on_device = any(t is not None and t.is_cuda for t in (last, kv_len))
        if max_kv_len is None and not (indptr.is_cuda or on_device):
            max_kv_len = longest_kv(indptr, last, given.page_size, kv_len)
        model, shape, max_q_len = self._shape(given, "plan")
        if self._use_cuda_graph:
            self._check_frozen(shape.batch_size, shape.rows, lengths.kv_indices)
            if most_rows is None and shape.rows >= 0:
                most_rows = shape.rows
        items = self._items(given)
        self._check_split(shape, lengths)
        mask, fill = self._mask(given, sizes)
        # A graph may run by a later plan with fewer queries, but not where all have as many.
        pads = self._use_cuda_graph and not is_uniform
        is_first = not (self._use_cuda_graph and self._plan.shape.block_m)
        guesses = shape.rows < 0 and max_q_len is None and is_first
        hints = Hints(
            max_q_len, max_kv_len, most_rows, given.block_tables, pads, guesses_tile=guesses
        )
        tables, non_blocking = self._plan.tables, given.non_blocking
        if not self._use_cuda_graph:
            tables = Tables(
                *[t if t is None else self._on_device(t, non_blocking) for t in lengths]
            )
        self._launch(given, model, shape, given.causal, lengths, tables, hints, mask, items, fill)

    def _check_frozen(self, batch_size: int, rows: int, kv_indices: torch.Tensor | None) -> None:
        """Check the sizes that CUDA graphs keep."""
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"{self._name}: The batch size should be fixed during the lifecycle of the wrapper "
                f"in cuda graph mode: it is {batch_size} and was {self._fixed_batch_size} when "
                f"the wrapper was made"
            )
        most = self._max_total_num_rows
        if most is not None and rows > most:
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
        self, given: Any, sizes: torch.Tensor | None
    ) -> tuple[Mask, Callable[[], None] | None]:
        """Return the mask, and under CUDA graphs a function that writes it into the buffers."""
        held, non_blocking = self._plan.mask, given.non_blocking
        if sizes is None:
            return (held._replace(is_used=False) if self._use_cuda_graph else NO_MASK), None
        if self._use_cuda_graph:
            for name, buffer in zip(("custom_mask_buf", "mask_indptr_buf"), held):
                if not isinstance(buffer, torch.Tensor):
                    raise ValueError(
                        f"{name} must be initialized with a torch.Tensor in cuda graph mode if we "
                        f"use custom mask in attention computation."
                    )
        self._check_mask(given.custom_mask, given.packed_custom_mask, sizes)

        def bits_into(buffer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if given.packed_custom_mask is not None:
                return given.packed_custom_mask, _byte_bounds(sizes)
            mask = given.custom_mask.to(self.device, non_blocking=non_blocking)
            return _packed(mask, sizes, buffer)

        def fill() -> None:
            bits, starts = bits_into(held.bits)
            assert held.bits is not None
            assert held.indptr is not None
            if bits.data_ptr() != held.bits.data_ptr():
                copy_to_start(held.bits, bits, non_blocking)
            held.indptr.copy_(starts, non_blocking=non_blocking)

        if self._use_cuda_graph:
            return held._replace(is_used=True), fill
        bits, starts = bits_into(None)
        bits = bits.to(self.device, non_blocking=non_blocking)
        return Mask(bits, self._on_device(starts, non_blocking), True), None

    def _check_mask(
        self,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        sizes: torch.Tensor,
    ) -> None:
        """Raise for a mask or a buffer that is too small, without waiting for the device."""
        name, buffers = f"{self._name}.plan", self._plan.mask
        needed = None
        if not sizes.is_cuda:
            needed = int(((sizes + 7) // 8).sum())
            if packed_custom_mask is not None:
                validation.check_mask_size(name, "packed_custom_mask", packed_custom_mask, needed)
            elif custom_mask is not None:
                validation.check_mask_size(name, "custom_mask", custom_mask, int(sizes.sum()))
        if self._use_cuda_graph and buffers.bits is not None:
            starts, bounds = buffers.indptr, sizes.shape[0] + 1
            if starts is not None and starts.shape != (bounds,):
                raise ValueError(
                    f"{name}: mask_indptr_buf must have shape [{bounds}], got {[*starts.shape]}"
                )
            if packed_custom_mask is not None:
                needed = packed_custom_mask.numel()
            if needed is not None:
                validation.check_mask_size(name, "custom_mask_buf", buffers.bits, needed)

    def _items(self, given: Any) -> Items:
        """Return the arguments of multi-item scoring in the dtypes that the kernels read."""
        if given.prefix_len_ptr is None:
            return NO_ITEMS
        if given.token_pos_in_items_ptr is None:
            raise ValueError(
                f"{self._name}.plan: token_pos_in_items_ptr must be a torch.Tensor where "
                f"prefix_len_ptr is one, got None"
            )
        places, size = given.token_pos_in_items_ptr, given.token_pos_in_items_len
        batch_size, longest = given.qo_indptr.shape[0] - 1, given.max_item_len_ptr
        if size == 0:
            size, places = places.numel(), places.flatten().repeat(batch_size)
        # Requests may be longer than a row: the kernels take what is behind it as delimiters.
        if size < 0 or places.numel() < batch_size * size:
            raise ValueError(
                f"{self._name}.plan: token_pos_in_items_ptr must have token_pos_in_items_len "
                f"positions for each of the {batch_size} requests, got {places.numel()} in all and "
                f"{size} for each. Fix: pad the positions of each request with zeros to one length"
            )
        return Items(
            given.prefix_len_ptr.to(self.device).to(torch.uint32),
            places.to(self.device).to(torch.uint16),
            size,
            None if longest is None else longest.to(self.device).to(torch.uint16),
        )

    def _raise_rows(self, tokens: int) -> None:
        raise ValueError(
            f"q.shape[0] ({tokens}) does not match qo_indptr[-1] ({self._qo_indptr_last}). For "
            f"{self._name}, q must have shape [total_tokens, num_heads, head_dim] where "
            f"total_tokens = qo_indptr[-1]."
        )


def _byte_bounds(sizes: torch.Tensor) -> torch.Tensor:
    """Return where the bytes of each request start, ``[batch + 1]``, int32."""
    return torch.nn.functional.pad(((sizes + 7) // 8).cumsum(0), (1, 0)).int()


def _packed(
    custom_mask: torch.Tensor, sizes: torch.Tensor, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a mask; return the bits and where each request starts. Waits for nothing."""
    flat = custom_mask.contiguous().view(-1)
    bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    bounds = bounds.to(flat.device, non_blocking=True)  # Nothing else writes them.
    if into is None:
        most = (flat.numel() + 7 * sizes.numel()) // 8
        into = torch.empty(most, dtype=torch.uint8, device=flat.device)
    return segment_packbits(flat, bounds, "little", into)
