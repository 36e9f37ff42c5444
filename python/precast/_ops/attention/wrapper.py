# SPDX-License-Identifier: Apache-2.0
"""What the wrappers of decode and prefill have in common: workspaces, a plan, and its run."""

from __future__ import annotations

from typing import Any, TypeAlias

from precast._base.dtypes import canonicalize_torch_dtype
from precast._base.errors import PlanMismatchError
from precast._base.torch import torch
from precast._ops.attention import enums as words
from precast._ops.attention import heuristics as tiles
from precast._ops.attention import kernels
from precast._ops.attention.cached_module import CachedModule

#: Of a buffer and what belongs into it.
Table: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"

#: Tables that ``plan`` begins with.
PLAN_TABLES = 4


class AttentionWrapper:
    """Workspaces and what a plan keeps; names of attributes are those that engines know."""

    _name = "AttentionWrapper"
    #: Whether a new output may have rows that no request has; those are 0.
    _pads = False
    #: 0: keys and values are not in pages.
    _page_size = 0

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: object,
        jit_kwargs: object = None,
    ) -> None:
        words.check_backend(self._name, backend)
        words.check_no_jit(self._name, jit_args, jit_kwargs)
        words.check_workspace(self._name, "float_workspace_buffer", float_workspace_buffer)
        self._hnd = words.check_kv_layout(self._name, kv_layout)
        self._kv_layout = kv_layout
        self._head_at, self._entry_at = (-3, -2) if self._hnd else (-2, -3)
        self.device = float_workspace_buffer.device
        self._device_key = (float_workspace_buffer.get_device(),)
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.empty(
            words.INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
        )
        self._pinned: torch.Tensor | None = None
        self._use_cuda_graph = use_cuda_graph
        self._fixed_batch_size = 0
        self._requested_backend = backend
        self._backend = backend
        self._jit_module = None
        self._cached_module: CachedModule | None = None
        self._plan_info: list[int] | None = None
        self._overwritten = False
        self._config: tuple[Any, ...] | None = None
        self._run_key: tuple[Any, ...] = ()
        self._cached_q_data_type: Any = None
        self._cached_kv_data_type: Any = None
        self._cached_o_data_type: Any = None
        self._num_qo_heads = self._num_kv_heads = self._head_dim_vo = 0
        self._tile_rows: int | None = None
        self._sinks: torch.Tensor | None = None
        self._block_tables: torch.Tensor | None = None
        self._max_q_len: int | None = None
        self._max_kv_len: int | None = None
        self._batch_size = 0
        self._planned_rows: int | None = None
        self._custom_mask_buf: torch.Tensor | None = None
        self._mask_indptr_buf: torch.Tensor | None = None
        self._prefix_len_ptr: torch.Tensor | None = None
        self._token_pos_in_items_ptr: torch.Tensor | None = None
        self._token_pos_in_items_len = 0
        self._max_item_len_ptr: torch.Tensor | None = None

    # -- workspaces -------------------------------------------------------------------------------

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._use_cuda_graph

    @property
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        """A twin of the workspace for integers in pinned memory; plans here do not need it."""
        if self._pinned is None:
            ints = self._int_workspace_buffer
            self._pinned = torch.empty(
                ints.shape, dtype=ints.dtype, device="cpu", pin_memory=ints.is_cuda
            )
        return self._pinned

    @_pin_memory_int_workspace_buffer.setter
    def _pin_memory_int_workspace_buffer(self, buffer: torch.Tensor) -> None:
        self._pinned = buffer

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Take other workspaces, of sizes as :meth:`workspace_size` says; then plan again.

        Parameters
        ----------
        float_workspace_buffer : torch.Tensor
            uint8 or int8 on the device of the wrapper, contiguous, 16-byte aligned. May hold
            anything, and be shared by wrappers whose kernels run on one stream.
        int_workspace_buffer : torch.Tensor
            The same; a plan lies in it until the next one, so it is shared with no other wrapper
            that runs in between.

        Raises
        ------
        ValueError
            An address that is no multiple of 16 bytes; buffers that overlap.
        """
        words.check_workspace(self._name, "float_workspace_buffer", float_workspace_buffer)
        words.check_workspace(self._name, "int_workspace_buffer", int_workspace_buffer)
        words.check_workspaces_apart(self._name, float_workspace_buffer, int_workspace_buffer)
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pinned = None
        self._forget_plan()  # It lay in the workspace before.

    # -- plan -------------------------------------------------------------------------------------

    def _forget_plan(self) -> None:
        """From now on a run says that there is no plan."""
        self._plan_info = self._config = self._cached_q_data_type = None
        self._overwritten = True

    def _configure(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        pos_encoding_mode: str,
        q_data_type: torch.dtype | str,
        kv_data_type: torch.dtype | str | None,
        o_data_type: torch.dtype | str | None,
    ) -> None:
        """Check and keep what does not depend on lengths."""
        name = f"{self._name}.plan"
        q, kv, o = dtypes_of(q_data_type, kv_data_type, o_data_type)
        words.check_heads(name, num_qo_heads, num_kv_heads)
        words.check_head_dims(name, head_dim_qk, head_dim_vo)
        words.check_dtypes(name, q, kv, o)
        if words.pos_encoding(name, pos_encoding_mode) == words.ALIBI:
            words.alibi_slopes(num_qo_heads, self.device)  # Not while a graph is captured.
        words.check_workspace(name, "float_workspace_buffer", self._float_workspace_buffer)
        words.check_workspace(name, "int_workspace_buffer", self._int_workspace_buffer)
        self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type = q, kv, o
        self._backend = "fa2"
        self._num_qo_heads, self._num_kv_heads = num_qo_heads, num_kv_heads
        self._head_dim_vo = head_dim_vo
        self._run_key = (q, kv, head_dim_qk, head_dim_vo, *self._device_key)
        if self._cached_module is None:
            self._cached_module = CachedModule(self)

    def _on_device(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Lengths where the kernels read them, as int32."""
        if tensor.dtype is torch.int32 and tensor.device == self.device:
            return tensor
        return tensor.to(self.device, torch.int32, non_blocking=non_blocking)

    def _placed(
        self, non_blocking: bool, buffer: torch.Tensor | None, table: torch.Tensor | None
    ) -> Table:
        """The buffer of a CUDA graph that a plan copies a table into, and where it reads it.

        The buffer is None if the table is in it: the caller has put it there, or it is copied now,
        from the host.
        """
        assert buffer is not None
        assert table is not None
        if table.dtype is torch.int32 and table.device == self.device and table.is_contiguous():
            there = table.data_ptr() == buffer.data_ptr() and table.numel() <= buffer.numel()
            return None if there else buffer, table
        whole = table.numel() == buffer.numel()
        part = buffer if whole else buffer[: table.numel()]
        # Why: what indices come from may change before a copy that nobody waits for.
        part.copy_(table, non_blocking=non_blocking and whole)
        return None, part

    def _tables(
        self,
        non_blocking: bool,
        qo: Table,
        kv: Table,
        last: Table = (None, None),
        indices: Table = (None, None),
    ) -> tuple[torch.Tensor | None, ...]:
        """What ``plan`` begins with, or ``fill_and_plan``: under CUDA graphs, each table with its
        buffer. One launch copies and plans; copies of their own would take longer than the plan.
        """
        if qo[1] is not None:
            qo = self._placed(non_blocking, *qo)
        kv = self._placed(non_blocking, *kv)
        if last[1] is not None:
            last = self._placed(non_blocking, *last)
        if indices[1] is not None:
            indices = self._placed(non_blocking, *indices)
        if qo[0] is kv[0] is last[0] is indices[0] is None:
            return qo[1], kv[1], last[1], None
        return qo[1], kv[1], last[1], indices[1], qo[0], kv[0], last[0], indices[0]

    def _choose_tile(
        self, q_len: int | None, tokens: int | None = None, batch_invariant: bool = False
    ) -> int:
        """Packed rows of a tile; under CUDA graphs those of the first plan, for launches stay."""
        if self._use_cuda_graph and self._tile_rows is not None:
            return self._tile_rows
        heads = self._num_qo_heads, self._num_kv_heads
        if batch_invariant:
            self._tile_rows = tiles.largest(self._head_dim_vo, self.device)
        else:
            self._tile_rows = tiles.choose(q_len, tokens, *heads, self._head_dim_vo, self.device)
        return self._tile_rows

    def _check_split(
        self,
        lengths: tuple[torch.Tensor | None, ...],
        batch_size: int,
        q_len_per_req: int,
        page_size: int,
        head_dim_qk: int,
        tile_rows: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int,
        disable_split_kv: bool,
    ) -> None:
        """Raise if lengths on the host need more room for parts of this size than there is."""
        heads = self._num_qo_heads, self._num_kv_heads
        needed = kernels.workspace_bytes(
            self.device,
            *lengths,
            batch_size,
            q_len_per_req,
            page_size,
            *heads,
            head_dim_qk,
            self._head_dim_vo,
            self._cached_kv_data_type.itemsize,
            tile_rows,
            causal,
            window_left,
            fixed_split_size,
            disable_split_kv,
        )
        buffers = {
            "float_workspace_buffer": self._float_workspace_buffer,
            "int_workspace_buffer": self._int_workspace_buffer,
        }
        for (name, buffer), size in zip(buffers.items(), needed):
            if buffer.numel() < size:
                raise ValueError(
                    f"{self._name}.plan: {name} must have at least {size} bytes for "
                    f"fixed_split_size={fixed_split_size}, got {buffer.numel()}: with longer parts "
                    f"results would depend on the batch. Fix: pass a larger one to "
                    f"reset_workspace_buffer()"
                )

    def _check_positions(
        self, pos_encoding_mode: str, rope_scale: float | None, rope_theta: float | None
    ) -> None:
        """Raise for options of forward() that plan() would refuse."""
        words.pos_encoding(self._name, pos_encoding_mode)
        words.check_rope(self._name, rope_scale, rope_theta)

    def _check_rows(self, tokens: int) -> None:
        """Raise, for there are not as many queries as planned."""
        raise NotImplementedError

    def _check_wider(self, window_left: int, causal: bool | None = None) -> None:
        """What forward() asks for must see nothing that the plan left out."""
        if self._plan_info is None:
            raise PlanMismatchError(f"{self._name}: there is no plan. Fix: call plan() first")
        _, planned_causal, planned_window = self._plan_info
        if planned_window >= 0 and not 0 <= window_left <= planned_window:
            raise PlanMismatchError(
                f"{self._name}: window_left is {window_left} and plan() had {planned_window}. Fix: "
                f"plan again with the wider window"
            )
        if planned_causal and causal is False:
            raise PlanMismatchError(
                f"{self._name}: causal is False and plan() had True. Fix: plan again with "
                f"causal=False"
            )


def dtypes_of(
    q_data_type: torch.dtype | str,
    kv_data_type: torch.dtype | str | None,
    o_data_type: torch.dtype | str | None,
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of queries, of keys and values, and of outputs; the first is the default."""
    q = canonicalize_torch_dtype(q_data_type)
    kv, o = (
        q if given is None else canonicalize_torch_dtype(given)
        for given in (kv_data_type, o_data_type)
    )
    return q, kv, o
