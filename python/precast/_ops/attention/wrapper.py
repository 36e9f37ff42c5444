# SPDX-License-Identifier: Apache-2.0
"""The base class of the wrappers of decode and prefill holds workspaces and the plan."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

from precast._base.dtypes import canonicalize_torch_dtype
from precast._base.errors import PlanMismatchError
from precast._base.torch import torch
from precast._op.scalars import RAW_KINDS, Arguments
from precast._ops.attention import backends, kernels, sm90, validation
from precast._ops.attention import heuristics as tiles
from precast._ops.attention.buffers import table_source
from precast._ops.attention.cached_module import CachedModule
from precast._ops.attention.enums import MaskMode
from precast._ops.attention.plan import (
    NO_ITEMS,
    NO_MASK,
    NO_TABLES,
    AttentionPlan,
    Hints,
    Items,
    Mask,
    Model,
    PlanAttributes,
    PlanShape,
    Scores,
    Tables,
)
from precast._ops.attention.signature import checked_first

#: The arguments of ``run()`` that ``forward()`` has, too.
_RUN_ARGUMENTS = ("q", "paged_kv_cache", "k", "v", "q_scale", "k_scale", "v_scale")
#: Types of options that ``forward()`` need not look at again.
_USUAL = (bool, int, float, str, NoneType)
_NOTHING_FORWARDED: tuple[Any, Any] = (None, None)


class _Reads(NamedTuple):
    """How a call of ``forward()`` is read: its options, and the arguments of ``run()``."""

    options: Callable[[Any], tuple[Any, ...]]
    names: tuple[str, ...]
    arguments: Callable[[Any], tuple[Any, ...]]


@functools.cache
def _reads_of(given: type) -> _Reads:
    """Make the readers of the arguments of one method, each of two names or more."""
    options = [name for name in Scores._fields if hasattr(given, name)]
    names = tuple(name for name in _RUN_ARGUMENTS if hasattr(given, name))
    return _Reads(operator.attrgetter(*options), names, operator.attrgetter(*names))


class AttentionWrapper(PlanAttributes):
    """Hold workspaces and the plan; attributes have the names that engines use."""

    _name = "AttentionWrapper"
    #: Of ``run()``.
    _run_arguments: Arguments
    #: What ``run()`` calls the keys, or the cache that holds them.
    _cache_argument = "paged_kv_cache"
    #: Whether ``run()`` takes ``sink`` and ``sm_scale`` by position.
    _takes_sinks = False
    #: Whether ``run()`` takes the scales of a cache in NVFP4.
    _takes_kv_cache_sf = False
    #: Whether kernels for prefill may run; False for a decode that does not ask for them.
    _use_tensor_cores = True
    #: What engines plan with by position.
    _cached_module_type: type[CachedModule] = CachedModule
    #: ``WITH_NEXT`` or ``WITH_PREVIOUS`` of a part whose kernel may overlap that of another.
    _overlap = 0
    #: Launches of plans that wait for other checks; None: a plan is launched at once.
    _checked_plans: list[Callable[[], None]] | None = None

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: object,
        jit_kwargs: object = None,
        variant_owns_mask: bool = False,
        buffers: Tables = NO_TABLES,
        mask: Mask = NO_MASK,
    ) -> None:
        backends.check_backend(self._name, backend, float_workspace_buffer.device)
        if backends.is_sink_variant(self._name, jit_args, jit_kwargs, variant_owns_mask):
            self._takes_sinks = True
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
        self._latest_tokens: int | None = None  # queries of a run whose plan did not know them
        self._requested_backend = backend
        self._backend = backend
        self._jit_module = None
        self._cached_module: CachedModule | None = None
        self._sinks: torch.Tensor | None = None
        #: The plan and the options of the latest call of ``forward()``.
        self._forwarded = _NOTHING_FORWARDED
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
        """Pinned memory as large as the int workspace; engines read it, plans here do not."""
        if self._pinned is None:
            ints = self._int_workspace_buffer
            self._pinned = torch.empty(
                ints.shape, dtype=ints.dtype, device="cpu", pin_memory=ints.is_cuda
            )
        return self._pinned

    @_pin_memory_int_workspace_buffer.setter
    def _pin_memory_int_workspace_buffer(self, buffer: torch.Tensor) -> None:
        self._pinned = buffer

    @checked_first
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
            Another dtype or device; gaps; an address that is no multiple of 16 bytes; buffers
            that overlap.
        """
        self._check_workspaces(float_workspace_buffer, int_workspace_buffer)
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pinned = None
        self._forget_plan()  # It lay in the workspace before.

    def _check_workspaces(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        """Raise unless the wrapper could take these."""
        given = {"float_workspace_buffer": floats, "int_workspace_buffer": ints}
        for argument, workspace in given.items():
            validation.check_workspace(self._name, argument, workspace)
            if workspace.device != self.device:
                raise ValueError(
                    f"{self._name}: {argument} must be on {self.device} as the wrapper, got "
                    f"{workspace.device}"
                )
        validation.check_workspaces_apart(self._name, floats, ints)

    # -- the plan ---------------------------------------------------------------------------------

    def _raise_rows(self, tokens: int) -> None:
        """Raise an error: a run has another number of queries than its plan."""
        raise NotImplementedError

    def _packed_plan(self) -> AttentionPlan:
        """Return the plan with its block, which is gone where an engine has set an attribute."""
        self._check_planned(f"{self._name}.run")
        plan = self._plan
        if plan.block is None:
            if plan.may_pair_heads == plan.shape.may_pair_heads:
                self._plan = kernels.pack(plan)
            else:
                self._divide_again(plan.shape._replace(may_pair_heads=False))
        return self._plan

    def _divide_again(self, shape: PlanShape) -> None:
        """Launch the plan with another shape; the tables are where the plan has them."""
        packed = kernels.pack(self._plan._replace(shape=shape))
        kernels.launch(packed, NO_TABLES)
        self._plan = packed

    def _on_device(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Return lengths where the kernels read them, as int32."""
        if tensor.dtype is torch.int32 and tensor.get_device() == self._device_index:
            return tensor
        return tensor.to(self.device, torch.int32, non_blocking=non_blocking)

    def _launch(
        self,
        given: Any,
        model: Model,
        shape: PlanShape,
        causal: bool,
        lengths: Tables,
        tables: Tables,
        hints: Hints,
        mask: Mask = NO_MASK,
        items: Items = NO_ITEMS,
        fill: Callable[[], None] | None = None,
    ) -> None:
        """Check a plan and launch it; it becomes the wrapper's when nothing can fail any more.

        ``given`` are the arguments of ``plan()``. Under CUDA graphs ``lengths`` and, by ``fill``, a
        mask are written into buffers that the plan before reads, too: a failure from there on
        leaves no plan.
        """
        if model.is_packed and not self._takes_kv_cache_sf:
            validation.refuse_packed(f"{self._name}.plan")
        before = self._plan
        scores = Scores(
            causal,
            given.window_left,
            0.0 if given.logits_soft_cap is None else given.logits_soft_cap,
            given.sm_scale,
            given.pos_encoding_mode,
            given.rope_scale,
            given.rope_theta,
            given.use_fp16_qk_reduction,
        )
        workspaces = self._int_workspace_buffer, self._float_workspace_buffer
        plan = AttentionPlan(
            model, shape, scores, tables, mask, items, hints, before.hnd, *workspaces
        )
        if self._use_cuda_graph and plan.is_packed_as(before):
            packed = before._replace(hints=hints)  # A step of a graph as the one before.
        else:
            packed = kernels.pack(plan)
        if self._use_cuda_graph:
            for name, buffer, table in zip(Tables._fields, packed.tables, lengths):
                if buffer is None or table is None or name == "kv_indices":
                    continue
                if table.numel() != buffer.numel():
                    raise ValueError(
                        f"{self._name}.plan: {name} must have shape [{buffer.numel()}], got "
                        f"{[*table.shape]}"
                    )
        start = packed, lengths, given.non_blocking, fill
        if self._checked_plans is None:
            self._start(*start)
        else:
            self._checked_plans.append(functools.partial(self._start, *start))

    def _start(
        self,
        packed: AttentionPlan,
        lengths: Tables,
        non_blocking: bool,
        fill: Callable[[], None] | None,
    ) -> None:
        """Launch a plan that has been checked."""
        sources = NO_TABLES
        if self._use_cuda_graph:
            self._forget_plan()
            if fill is not None:
                fill()
            pairs = zip(packed.tables, lengths)
            sources = Tables(*(table_source(*pair, non_blocking) for pair in pairs))
        kernels.launch(packed, sources)
        self._keep(packed)

    def _keep(self, launched: AttentionPlan) -> None:
        self._plan = launched
        # Engines choose the arguments of _cached_module.plan() by it.
        self._backend = "fa3" if self._requested_backend == "fa3" else "fa2"
        if self._cached_module is None:
            self._cached_module = self._cached_module_type(self)

    def _with_tile(
        self,
        model: Model,
        shape: PlanShape,
        q_len: int | None,
        tokens: int | None = None,
    ) -> PlanShape:
        """Choose the kernels and the packed rows of a tile; a CUDA graph keeps the first ones.

        ``q_len`` is the most queries of a request, ``tokens`` those of all; None is unknown. Where
        both are, the requests of the run before are the best guess: see :meth:`_settle_tile`.
        """
        heads, head_dims = shape[4:6], shape[6:8]
        if q_len is None:
            tokens = self._latest_tokens if tokens is None else tokens
            if tokens is not None:
                q_len = tiles.likely_q_len(tokens, shape.batch_size, heads[0] // heads[1])
        first = self._plan.shape
        invariant = shape.disable_split_kv or shape.fixed_split_size > 0
        if self._use_cuda_graph and first.block_m:
            return shape.with_tile(first.block_m, first.sm90)
        if self._use_tensor_cores and self._requested_backend != "fa2":
            given = model.key[:2], shape
            is_theirs = (
                sm90.runs(*given, self.device)
                if self._requested_backend == "fa3"
                else sm90.suits(*given, None if invariant else q_len, self.device)
            )
            if is_theirs and not model.is_packed:
                return sm90.with_tile(shape)
        if self._requested_backend == "fa3":
            backends.note_fa3()
        if invariant:
            block_m = tiles.largest(head_dims, self.device)
        else:
            block_m = tiles.choose(q_len, tokens, *heads, head_dims, self.device)
        return shape.with_tile(block_m, False)

    def _settle_tile(self, tokens: int) -> AttentionPlan:
        """Return the plan for a first run of so many queries, divided again if its tile was wrong.

        A captured run keeps the tile, because the division would be part of the graph.
        """
        plan = self._plan._replace(hints=self._plan.hints._replace(guesses_tile=False))
        self._plan, self._latest_tokens = plan, tokens
        if plan.int_workspace is None or self._is_capturing():
            return plan
        first = plan.shape._replace(block_m=0)
        self._plan = plan._replace(shape=first)  # Under CUDA graphs, too, this is the first tile.
        shape = self._with_tile(plan.model, first, None, tokens)
        self._plan = plan
        if shape != plan.shape:
            self._divide_again(shape)
        return self._plan

    def _is_capturing(self) -> bool:
        """Whether what is launched now becomes part of a CUDA graph."""
        return self.device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())

    def _check_split(self, shape: PlanShape, lengths: Tables) -> None:
        """Raise if lengths on the host need more room for splits of this size than there is."""
        if shape.fixed_split_size <= 0 or any(t is not None and t.is_cuda for t in lengths[:3]):
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

    # -- deprecated -------------------------------------------------------------------------------

    def _forward(self, given: Any, return_lse: bool = False) -> Any:
        """Run with options of ``forward()`` in the place of the plan's, which they stay.

        Engines call it in every layer with the same options. Only the first call after a plan
        looks at them, so that those behind it cost little more than ``run()``.
        """
        kind: Any = type(given)
        reads = _reads_of(kind)
        options = reads.options(given)
        plan, known = self._forwarded
        if plan is not self._plan or known != options:
            return self._forward_anew(given, reads, return_lse)
        arguments = dict(zip(reads.names, reads.arguments(given)))
        return self.run(**arguments, return_lse=return_lse)  # type: ignore[attr-defined]

    def _forward_anew(self, given: Any, reads: _Reads, return_lse: bool) -> Any:
        """Run with options that may not be those of the plan."""
        name, before, planned = self._name, self._plan, self._plan.shape
        options = {name: getattr(given, name) for name in Scores._fields if hasattr(given, name)}
        if options["logits_soft_cap"] is None:
            options["logits_soft_cap"] = 0.0
        scores = Scores(**{"causal": self._causal, **options})
        self._check_planned(name)
        validation.pos_encoding(name, scores.pos_encoding_mode)
        validation.check_rope(name, scores.rope_scale, scores.rope_theta)
        if scores != before.scores:
            given.public_arguments.check(given._asdict())
            self._plan = before._replace(scores=scores, block=None)
        try:
            self._widen()
            arguments = dict(zip(reads.names, reads.arguments(given)))
            result = self.run(**arguments, return_lse=return_lse)  # type: ignore[attr-defined]
        except RAW_KINDS:
            # A later run() would fail, too, or have other options. A wider division serves them.
            shape = self._plan.shape
            self._plan = before if shape is planned else before._replace(shape=shape, block=None)
            raise
        # Options of other types, which compare equal, are looked at each time.
        is_usual = all(type(value) in _USUAL for value in reads.options(given))
        self._forwarded = (self._plan, reads.options(given)) if is_usual else _NOTHING_FORWARDED
        return result

    def _widen(self) -> None:
        """Divide the work again if queries now see tokens that the plan has left out."""
        plan, shape, scores = self._plan, self._plan.shape, self._plan.scores
        causal = shape.causal and plan.mask_mode in (MaskMode.CAUSAL, MaskMode.MULTIITEMSCORING)
        window_left = shape.window_left
        if window_left >= 0 and not 0 <= scores.window_left <= window_left:
            window_left = scores.window_left
        wider = shape._replace(
            causal=causal, window_left=window_left, may_pair_heads=plan.may_pair_heads
        )
        if wider == shape:
            return
        if shape.fixed_split_size > 0:
            raise PlanMismatchError(
                f"{self._name}: causal is {scores.causal} and window_left is {scores.window_left}, "
                f"plan() had {shape.causal} and {shape.window_left}, and with fixed_split_size the "
                f"host checks the workspaces for what queries see. Fix: plan again with these"
            )
        self._divide_again(wider)

    def end_forward(self) -> None:
        """Do nothing; older engines call it."""


def checked_model(name: str, method: str, *given: Any) -> Model:
    """Check what does not depend on the batch, and choose the module; takes what _model does."""
    try:
        return _model(name, method, *given)
    except TypeError:  # What cannot be a key of the cache has an error that names it.
        return _model.__wrapped__(name, method, *given)


@functools.lru_cache(maxsize=256)
def _model(
    name: str,
    method: str,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    pos_encoding_mode: str,
    dtypes: tuple[Any, Any, Any],
    device_index: int,
) -> Model:
    """Check what does not depend on the batch, and choose the module."""
    name = f"{name}.{method}"
    q = canonicalize_torch_dtype(dtypes[0], f"{name}: q_data_type")
    kv, o = (
        q if given is None else canonicalize_torch_dtype(given, f"{name}: {argument}")
        for given, argument in zip(dtypes[1:], ("kv_data_type", "o_data_type"))
    )
    validation.check_heads(name, *heads)
    validation.check_head_dims(name, *head_dims)
    computed = validation.computed_dtype(q, kv, o)
    is_packed = kv is torch.uint8
    if is_packed:
        validation.check_packed(name, computed, *head_dims)
    validation.check_dtypes(name, computed, computed if is_packed else kv, o)
    validation.pos_encoding(name, pos_encoding_mode)
    dtypes_of_key = (computed,) if is_packed else (computed, kv)
    key = (*dtypes_of_key, *head_dims, device_index)
    converts_to = None if computed is q else computed
    fp8_key = sm90.fp8_key((q, kv, computed), head_dims, device_index)
    is_like_q = o is q and head_dims[0] == head_dims[1]
    return Model(q, kv, o, key, converts_to, fp8_key, o is computed, is_like_q, is_packed)
