# SPDX-License-Identifier: Apache-2.0
"""The base class of the wrappers of decode and prefill: workspaces and the plan of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from precast._base.errors import PlanMismatchError
from precast._base.torch import torch
from precast._ops.attention import heuristics as tiles
from precast._ops.attention import kernels, validation
from precast._ops.attention.buffers import alibi_slopes
from precast._ops.attention.cached_module import CachedModule, DecodeArguments, PrefillArguments
from precast._ops.attention.plan import (
    NO_ITEMS,
    NO_MASK,
    NO_TABLES,
    AttentionPlan,
    Hints,
    Mask,
    Model,
    PlanShape,
    Scores,
    Tables,
)


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


class AttentionWrapper:
    """Workspaces and the plan; attributes have the names that engines know."""

    _name = "AttentionWrapper"

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

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: object,
        jit_kwargs: object = None,
        buffers: Tables = NO_TABLES,
        mask: Mask = NO_MASK,
    ) -> None:
        validation.check_backend(self._name, backend)
        validation.check_no_jit(self._name, jit_args, jit_kwargs)
        validation.check_workspace(self._name, "float_workspace_buffer", float_workspace_buffer)
        hnd = validation.check_kv_layout(self._name, kv_layout)
        self._kv_layout = kv_layout
        self.device = float_workspace_buffer.device
        self._device_index = float_workspace_buffer.get_device()
        # A plan takes the workspaces that stand here when it is made.
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.empty(
            validation.INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
        )
        self._pinned: torch.Tensor | None = None
        self._use_cuda_graph = use_cuda_graph
        self._fixed_batch_size = 0
        self._requested_backend = backend
        self._backend = backend
        self._jit_module = None
        self._cached_module: CachedModule | None = None
        self._sinks: torch.Tensor | None = None
        self._plan = AttentionPlan(
            Model(),
            PlanShape(),
            Scores(),
            buffers,
            mask,
            NO_ITEMS,
            Hints(),
            hnd,
            int_workspace=None,
            float_workspace=None,
        )

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
        floats, ints = float_workspace_buffer, int_workspace_buffer
        validation.check_workspace(self._name, "float_workspace_buffer", floats)
        validation.check_workspace(self._name, "int_workspace_buffer", ints)
        validation.check_workspaces_apart(self._name, floats, ints)
        self._float_workspace_buffer, self._int_workspace_buffer = floats, ints
        self._pinned = None
        self._forget_plan()  # It lay in the workspace before.

    # -- the plan ---------------------------------------------------------------------------------

    @property
    def _plan_info(self) -> list[int] | None:
        """Rows of a tile, ``causal`` and ``window_left`` of the plan; None if there is none."""
        shape = self._plan.shape
        if not self._plan.is_launched:
            return None
        return [shape.tile_rows, int(shape.causal), shape.window_left]

    @_plan_info.setter
    def _plan_info(self, info: list[int] | None) -> None:
        # Engines store here what _cached_module.plan() returned, which has kept its plan itself.
        if info is None:
            self._forget_plan()

    def _forget_plan(self) -> None:
        """From now on a run says that there is no plan."""
        self._plan = self._plan._replace(block=None, is_launched=False)

    def _check_planned(self, method: str) -> None:
        if not self._plan.is_launched:
            raise PlanMismatchError(f"{method}: there is no plan. Fix: call plan() first")

    def _raise_rows(self, tokens: int) -> None:
        """Raise: a run has another number of queries than its plan."""
        raise NotImplementedError

    def _packed_plan(self) -> AttentionPlan:
        """The plan with its block, which an attribute that an engine has set takes away."""
        self._check_planned(f"{self._name}.run")
        if self._plan.block is None:
            self._plan = kernels.pack(self._plan)
        return self._plan

    def _model(
        self,
        heads: tuple[int, int],
        head_dims: tuple[int, int],
        pos_encoding_mode: str,
        dtypes: tuple[Any, Any, Any],
    ) -> Model:
        """Check what does not depend on the batch."""
        if pos_encoding_mode == "ALIBI":
            alibi_slopes(heads[0], self.device)  # Not while a graph is captured.
        index = self._device_index
        return _checked_model(self._name, *heads, *head_dims, pos_encoding_mode, *dtypes, index)

    def _on_device(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Lengths where the kernels read them, as int32."""
        if tensor.dtype is torch.int32 and tensor.device == self.device:
            return tensor
        return tensor.to(self.device, torch.int32, non_blocking=non_blocking)

    def _launch(
        self,
        plan: AttentionPlan,
        given: Tables,
        non_blocking: bool,
        fill: Callable[[], None] | None = None,
    ) -> None:
        """Divide the work; the plan becomes the wrapper's when nothing can fail any more.

        Under CUDA graphs ``given`` and, by ``fill``, a mask are written into buffers that the plan
        before reads, too: a failure from there on leaves no plan.
        """
        before = self._plan
        if self._use_cuda_graph and plan.is_packed_as(before):
            packed = before._replace(hints=plan.hints)  # A step of a graph as the one before.
        else:
            packed = kernels.pack(plan)
        sources = NO_TABLES
        if self._use_cuda_graph:
            self._check_lengths(packed, given)
            self._forget_plan()
            if fill is not None:
                fill()
            sources = Tables(*(_source(*pair, non_blocking) for pair in zip(packed.tables, given)))
        kernels.launch(packed, sources)
        self._keep(packed)

    def _keep(self, launched: AttentionPlan) -> None:
        self._plan = launched
        self._backend = "fa2"
        if self._cached_module is None:
            self._cached_module = CachedModule(self._plan_decode_of, self._plan_prefill_of)

    def _check_lengths(self, plan: AttentionPlan, given: Tables) -> None:
        """Lengths for buffers of CUDA graphs are as long as these."""
        for name, buffer, table in zip(Tables._fields[:3], plan.tables, given):
            if buffer is not None and table is not None and table.numel() != buffer.numel():
                raise ValueError(
                    f"{self._name}.plan: {name} must have shape [{buffer.numel()}], got "
                    f"{[*table.shape]}"
                )

    def _choose_tile(
        self,
        heads: tuple[int, int],
        head_dim_vo: int,
        q_len: int | None,
        tokens: int | None = None,
        batch_invariant: bool = False,
    ) -> int:
        """Packed rows of a tile; under CUDA graphs those of the first plan, for launches stay."""
        first = self._plan.shape.tile_rows
        if self._use_cuda_graph and first:
            return first
        if batch_invariant:
            return tiles.largest(head_dim_vo, self.device)
        return tiles.choose(q_len, tokens, *heads, head_dim_vo, self.device)

    def _check_split(self, shape: PlanShape, lengths: Tables) -> None:
        """Raise if lengths on the host need more room for splits of this size than there is."""
        if shape.fixed_split_size <= 0 or any(t is not None and t.is_cuda for t in lengths):
            return
        needed = kernels.workspace_bytes(self.device, shape, lengths)
        for argument, size in zip(("float_workspace_buffer", "int_workspace_buffer"), needed):
            got = getattr(self, f"_{argument}").numel()
            if got < size:
                raise ValueError(
                    f"{self._name}.plan: {argument} must have at least {size} bytes for "
                    f"fixed_split_size={shape.fixed_split_size}, got {got}: with longer parts "
                    f"results would depend on the batch. Fix: pass a larger one to "
                    f"reset_workspace_buffer()"
                )

    # -- plans of engines -------------------------------------------------------------------------

    def _plan_decode_of(self, given: DecodeArguments) -> list[int]:
        """Of ``_cached_module.plan()`` with the arguments of decode."""
        lengths = self._plan.tables._replace(kv_indptr=self._on_device(given.kv_indptr, False))
        return self._replan(given, lengths, 1, given.batch_size, False, -1, False)

    def _plan_prefill_of(self, given: PrefillArguments) -> list[int]:
        """Of ``_cached_module.plan()`` with the arguments of prefill."""
        q_len = given.uniform_q_len or None
        if q_len is None and not given.qo_indptr.is_cuda:
            q_len = int(given.qo_indptr.diff().max()) if given.batch_size else 0
        lengths = self._plan.tables._replace(
            qo_indptr=self._on_device(given.qo_indptr, False),
            kv_indptr=self._on_device(given.kv_indptr, False),
            kv_len=self._on_device(given.kv_len, False),
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
        self._check_planned("_cached_module.plan")
        before = self._plan
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
            tile_rows=self._choose_tile(heads, given.head_dim_vo, q_len, tokens, invariant),
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
        if self._use_cuda_graph:  # The next plan's lengths are those of the buffers again.
            packed = packed._replace(block=None)
        self._keep(packed)
        assert self._plan_info is not None
        return self._plan_info

    # -- deprecated options of forward() ----------------------------------------------------------

    def _take_scores(self, scores: Scores, causal: bool | None = None) -> None:
        """Options of forward() in the place of the plan's, which must see as many tokens."""
        self._check_planned(self._name)
        validation.pos_encoding(self._name, scores.pos_encoding_mode)
        validation.check_rope(self._name, scores.rope_scale, scores.rope_theta)
        planned, window_left = self._plan.shape, scores.window_left
        if planned.window_left >= 0 and not 0 <= window_left <= planned.window_left:
            raise PlanMismatchError(
                f"{self._name}: window_left is {window_left} and plan() had "
                f"{planned.window_left}. Fix: plan again with the wider window"
            )
        if planned.causal and causal is False:
            raise PlanMismatchError(
                f"{self._name}: causal is False and plan() had True. Fix: plan again with "
                f"causal=False"
            )
        if scores != self._plan.scores:
            self._plan = self._plan._replace(scores=scores, block=None)


@functools.lru_cache(maxsize=256)
def _checked_model(
    name: str,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: str,
    q_data_type: torch.dtype | str,
    kv_data_type: torch.dtype | str | None,
    o_data_type: torch.dtype | str | None,
    device_index: int,
) -> Model:
    name = f"{name}.plan"
    q, kv, o = validation.dtypes_of(q_data_type, kv_data_type, o_data_type)
    validation.check_heads(name, num_qo_heads, num_kv_heads)
    validation.check_head_dims(name, head_dim_qk, head_dim_vo)
    validation.check_dtypes(name, q, kv, o)
    validation.pos_encoding(name, pos_encoding_mode)
    key = (q, kv, head_dim_qk, head_dim_vo, device_index)
    return Model(q, kv, o, key, o is q, o is q and head_dim_qk == head_dim_vo)


def _source(
    buffer: torch.Tensor | None, table: torch.Tensor | None, non_blocking: bool
) -> torch.Tensor | None:
    """Where the launch of a plan copies a buffer from; None if the table is in it.

    The caller has put it there, or it is copied now: from the host, or from another dtype.
    """
    if buffer is None or table is None:
        return None
    if table.dtype is torch.int32 and table.device == buffer.device and table.is_contiguous():
        return None if table.data_ptr() == buffer.data_ptr() else table
    whole = table.numel() == buffer.numel()
    part = buffer if whole else buffer[: table.numel()]
    # Why: what indices come from may change before a copy that nobody waits for.
    part.copy_(table, non_blocking=non_blocking and whole)
    return None
