# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over pages of compressed keys and values.

Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1 (MLA and its absorbed weights); Ye et al.,
FlashInfer, arXiv:2501.01005 (the wrapper); Osama et al., Stream-K, arXiv:2301.03598 (the division
of work).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.scalars import RAW_KINDS
from precast._ops.attention import backends, kernels, validation
from precast._ops.attention.lengths import total_and_longest
from precast._ops.attention.plan import (
    NO_TABLES,
    AttentionPlan,
    Hints,
    Model,
    PlanField,
    PlanShape,
    Tables,
)
from precast._ops.attention.signature import checked_first, gathers, public_arguments
from precast._ops.mla import run as running
from precast._ops.mla import tiles
from precast._ops.mla._docs import PLAN, RUN
from precast._ops.mla.cached_module import MLACachedModule
from precast._ops.mla.metadata import (
    MLAPlanMetadata,
    batch_of,
    list_of_pages,
    places_of,
    tables_of,
)
from precast._ops.mla.options import Contract, checked_options
from precast._ops.mla.reference import batch_mla_paged_attention_reference
from precast._ops.mla.run import PlannedWrapper, Scale
from precast._ops.mla.trace import mla_trace
from precast.api_logging import precast_api

#: Arguments of plan() whose truth counts.
_FLAGS = ("causal", "use_profiler", "skip_softmax", "enable_pdl", "use_sinks")
_TRACE = mla_trace(batch_mla_paged_attention_reference, lambda: BatchMLAPagedAttentionWrapper)


class _PlanOptions:
    """What plans of attention have and MLA has not, for ``_launch``."""

    window_left, logits_soft_cap, use_fp16_qk_reduction = -1, 0.0, False
    pos_encoding_mode, rope_scale, rope_theta, non_blocking = "NONE", None, None, True

    def __init__(self, sm_scale: float) -> None:
        self.sm_scale = sm_scale


class _Latest(NamedTuple):
    """The latest plan of a list of pages on the device, and what it was asked for."""

    options: tuple[Any, ...]  # all arguments but the list
    places: tuple[Any, ...]  # of the list
    plan: AttentionPlan


@documented(PLAN)
class BatchMLAPagedAttentionWrapper(PlannedWrapper):
    r"""Compute multi-head latent attention (MLA) of a batch over a paged cache.

    .. math::

        O_{i, h} = \sum_j \mathrm{softmax}_j(s_{i, h, j}) C_j, \quad
        s_{i, h, j} = sm\_scale \cdot (Q^{nope}_{i, h} \cdot C_j + Q^{pe}_{i, h} \cdot P_j)
        + mask_{i, j}

    where :math:`C_j` is the compressed row (``ckv``) of token :math:`j`, :math:`P_j` its rotary row
    (``kpe``), and :math:`j` runs over the tokens of the request of query :math:`i`. Up-projections
    of keys and values are absorbed into queries and outputs, so all heads read one row a token.
    :meth:`plan` divides the work of a batch among the SMs, :meth:`run` does it, once for each
    layer. A query may be one of a decode or one of many: chunks of a prefill are computed, too.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        uint8 or int8 on the device of the tensors, contiguous, 16-byte aligned: place for partial
        results, 128 MB is always enough. May hold anything. Runs that share it, and runs of one
        plan, follow one another: never on two streams at once.
    use_cuda_graph : bool
        Whether :meth:`run` is captured; then the batch size is that of the buffers below, and
        :meth:`plan` copies into them.
    qo_indptr, kv_indptr : torch.Tensor, optional
        ``[batch_size + 1]``, int32 on the device, needed with ``use_cuda_graph``.
    kv_indices : torch.Tensor, optional
        int32, as many pages as there ever are.
    kv_len_arr : torch.Tensor, optional
        ``[batch_size]``, int32.

    Raises
    ------
    precast.errors.BackendSupportedError
        Another backend, or ``fa3`` on a GPU that is not of compute capability 9.0.
    ValueError
        A workspace that is not aligned; with ``use_cuda_graph``, a missing buffer, or one that does
        not fit the others.

    Examples
    --------
    >>> import torch, precast
    >>> from precast.mla import BatchMLAPagedAttentionWrapper
    >>> with precast.reference_mode():
    ...     wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1024).byte())
    ...     one = torch.tensor([0, 1], dtype=torch.int32)
    ...     wrapper.plan(
    ...         one, one, one[:1], one[1:] + 1, 2, 512, 64, 4, False, 0.1, torch.float32,
    ...         torch.float32,
    ...     )
    ...     ckv = torch.arange(4.0).view(1, 4, 1).expand(1, 4, 512)
    ...     q = torch.zeros(1, 2, 576)
    ...     wrapper.run(q[..., :512], q[..., 512:], ckv, torch.zeros(1, 4, 64))[:, :, 0]
    tensor([[0.5000, 0.5000]])
    """

    _name = "BatchMLAPagedAttentionWrapper"
    _cached_module_type = MLACachedModule
    _kv_indptr_buf = PlanField("tables", "kv_indptr")
    _kv_indices_buf = PlanField("tables", "kv_indices")
    _kv_len_arr_buf = PlanField("tables", "kv_len")
    _q_data_type = PlanField("model", "q_dtype")
    _kv_data_type = PlanField("model", "kv_dtype")
    _head_dim_ckv = PlanField("shape", "head_dim_vo")
    _use_profiler = False
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(batch_mla_paged_attention_reference)

    @precast_api
    @checked_first
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = Tables(qo_indptr, kv_indptr, None, kv_indices, kv_len_arr)
        super().__init__(
            float_workspace_buffer, "NHD", use_cuda_graph, backend, None, buffers=buffers
        )
        self._contract = Contract()
        self._latest: _Latest | None = None
        if not use_cuda_graph:
            return
        named: dict[str, Any] = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }
        validation.check_buffers(self._name, self.device, "CUDA graph", **named)
        self._fixed_batch_size = len(named["kv_len_arr"])
        for name in ("qo_indptr", "kv_indptr"):
            if len(named[name]) != self._fixed_batch_size + 1:
                raise ValueError(
                    f"{self._name}: {name} must have {self._fixed_batch_size + 1} elements, one "
                    f"more than kv_len_arr, got {len(named[name])}"
                )

    def _plans_as_before(self, given: Any) -> bool:
        """Plan with the options of the latest plan for as many requests, else return False.

        What follows from the options is that plan's. So is the params block if the lists lie at the
        same places: it has addresses and sizes, and the plan keeps what lies there alive, so they
        are views of the same memory.
        """
        latest = self._latest
        # Without its block, the plan has been changed or forgotten since.
        if latest is None or latest.plan.block is not self._plan.block:
            return False
        plan = latest.plan
        if not (
            plan.int_workspace is self._int_workspace_buffer
            and plan.float_workspace is self._float_workspace_buffer
            and given[4:] == latest.options
        ):
            return False
        try:
            places = places_of(given)
        except AttributeError:  # What is no tensor has an error that names it.
            return False
        if places != latest.places:
            qo_indptr, kv_indptr, indices, lens = given[:4]
            if lens.shape != (plan.shape.batch_size,):
                return False
            try:
                plan = kernels.pack_again(plan, Tables(qo_indptr, kv_indptr, None, indices, lens))
            except RAW_KINDS:  # What does not fit has an error that names it, or is converted.
                return False
            self._latest = _Latest(latest.options, places, plan)
        self._plan = plan
        try:
            kernels.launch(plan, NO_TABLES)
        except BaseException:
            self._forget_plan()  # The block of the plan before is now this one's.
            raise
        return True

    def _plan_mla(self, given: Any) -> None:
        if self._plans_as_before(given):
            return
        name = f"{self._name}.plan"
        batch, is_flat_csr = batch_of(name, given)
        model, contract = checked_options(name, given, is_flat_csr, self._device_index)
        tables, count, in_place = tables_of(name, batch, self.device)
        assert tables.qo_indptr is not None
        rows, q_len = -1, batch.max_q_len
        if not tables.qo_indptr.is_cuda:
            rows, q_len = total_and_longest(tables.qo_indptr, q_len)
        ckv, causal, sm_scale = given.head_dim_ckv, given.causal, given.sm_scale
        shape = PlanShape(
            count,
            rows,
            0,
            given.page_size,
            given.num_heads,
            1,
            ckv + given.head_dim_kpe,
            ckv,
            model.kv_dtype.itemsize,
            causal=causal,
            mla=True,
        )
        is_first = not (self._use_cuda_graph and self._plan.shape.block_m)
        shape = self._with_tile(model, shape, q_len, None if rows < 0 else rows, sm_scale)
        if shape.sm90 and sm_scale <= 0:
            raise ValueError(
                f"{name}: sm_scale must be positive as in the first plan, whose kernels a CUDA "
                f"graph keeps, got {sm_scale}. Fix: make the wrapper with backend='fa2'"
            )
        guesses = rows < 0 and q_len is None and is_first and not shape.sm90
        hints = Hints(q_len, None, None, batch.block_tables, self._use_cuda_graph, False, guesses)
        if self._use_cuda_graph:
            self._check_frozen(name, count, tables)
            kept = self._plan.tables
        elif in_place:
            kept = tables
        else:
            kept = Tables(*(t if t is None else self._on_device(t, True) for t in tables))
        self._launch(_PlanOptions(sm_scale), model, shape, causal, tables, kept, hints)
        self._contract = contract
        self._latest = None
        # What is on the host is read by plan(), and buffers of graphs are written.
        if is_flat_csr and in_place and rows < 0 and not self._use_cuda_graph:
            self._latest = _Latest(given[4:], places_of(given), self._plan)

    @precast_api
    @gathers(_plan_mla, (*_FLAGS, "max_q_len"))
    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | str | None = None,
        kv_data_type: torch.dtype | str | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | str | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Divide the work of a batch, for all runs until the next plan.

        The batch is given as a list of pages (the first four arguments), as a table of pages
        (``cum_seq_lens_q``, ``block_tables``, ``seq_lens``), or as ``metadata`` with one of these.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``[batch_size + 1]``, int32, on the device or on the host: where the queries of each
            request start.
        kv_indptr : torch.Tensor
            ``[batch_size + 1]``, likewise: where its pages start in ``kv_indices``.
        kv_indices : torch.Tensor
            int32, at least ``kv_indptr[-1]``: the pages; what is behind them is not read.
        kv_len_arr : torch.Tensor
            ``[batch_size]``, int32, likewise: the tokens of each request, those of its queries
            among them. Its pages may have room for more.
        metadata : MLAPlanMetadata, optional
            The batch in one of the forms.
        cum_seq_lens_q : torch.Tensor
            As ``qo_indptr``.
        block_tables : torch.Tensor
            ``[batch_size, pages]``, int32, likewise: the pages of each request; what is behind its
            tokens is not read.
        seq_lens : torch.Tensor
            As ``kv_len_arr``.
        max_q_len : int, optional
            The most queries of a request, with a table. It only saves time, and only if
            ``cum_seq_lens_q`` is on the device, where the host cannot know it.
        query_layout, kv_cache_layout : str, optional
            ``split`` or ``packed``. Without effect: :meth:`run` takes both.
        lse_mode : str
            ``none``, ``base2`` or ``basee``: the log-sum-exp that runs ask for. With ``none`` and a
            list of pages that is no ``metadata``, each run decides.
        output_dtype : torch.dtype or str, optional
            Of outputs. Default: that of queries. With ``output_scale``, float8_e4m3fn or
            float8_e5m2.
        output_scale : str
            ``none``, or ``per-tensor`` for runs with ``o_scale``.
        scale_mode : str
            ``default``; ``kv-per-tensor``, which is the default of caches of 8 bits: runs have
            ``ckv_scale`` or ``ckv_scale_arr``, and ``kpe_scale``; ``bmm-scalar``: runs have
            ``bmm1_scale`` and ``bmm2_scale``.
        use_profiler, skip_softmax : bool
            False: no kernel here has it.
        use_sinks : bool
            Whether runs have ``sinks``.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            A head dimension or dtype that no kernel is for (a ``ValueError``).
        NotImplementedError
            ``scale_mode`` ``bmm-tensor``, ``use_profiler``, ``skip_softmax``.
        TypeError
            A missing argument, or none of the forms of a batch.
        ValueError
            Two forms, or a part of one; tensors whose lengths are not those of one batch; an option
            that is none of its words; under CUDA graphs another batch size, or more pages than the
            buffer has.

        Notes
        -----
        Lengths on the device stay there: nothing is copied to the host or waited for. Without CUDA
        graphs the tables that are on the device are read by :meth:`run`.
        """

    def _with_tile(
        self,
        model: Model,
        shape: PlanShape,
        q_len: int | None,
        tokens: int | None = None,
        sm_scale: float | None = None,
    ) -> PlanShape:
        """Return the shape with its tile and kernels; ``sm_scale``: that of the plan, if None."""
        first = self._plan.shape
        if self._use_cuda_graph and first.block_m:
            return shape.with_tile(first.block_m, first.sm90)
        scale = self._plan.scores.sm_scale if sm_scale is None else sm_scale
        tokens = self._latest_tokens if tokens is None else tokens
        if self._requested_backend != "fa2" and (scale or 0.0) > 0:
            given = model.key[:2], shape
            is_theirs = (
                tiles.runs_on_sm90(*given, self.device)
                if self._requested_backend == "fa3"
                else tiles.suits_sm90(*given, q_len, tokens, self.device)
            )
            if is_theirs:
                return shape.with_tile(tiles.SM90_BLOCK_M, True)
            if self._requested_backend == "fa3":
                backends.note_fa3()
        return shape.with_tile(tiles.block_m(shape, q_len, tokens, self.device), False)

    def _check_frozen(self, name: str, batch_size: int, tables: Tables) -> None:
        """Check the sizes that CUDA graphs keep."""
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"{name}: the batch size must be {self._fixed_batch_size} as that of the buffers "
                f"for CUDA graphs, got {batch_size}"
            )
        buffer, indices = self._plan.tables.kv_indices, tables.kv_indices
        assert buffer is not None
        assert indices is not None
        if indices.shape[0] > buffer.shape[0]:
            raise ValueError(
                f"{name}: there must be at most {buffer.shape[0]} pages, as many as the buffer "
                f"kv_indices has, got {indices.shape[0]}"
            )

    def _divide_for(self, kv_len: torch.Tensor | None, page_table: torch.Tensor | None) -> None:
        """Divide the work again for other lengths or pages on the device, which the plan has then.

        Nothing is waited for, so this can be part of a CUDA graph.
        """
        type(self)._run_arguments.check({"kv_len": kv_len, "page_table": page_table})
        name, plan = f"{self._name}.run", self._packed_plan()
        batch = plan.shape.batch_size
        lengths = Tables(kv_len=kv_len)
        if page_table is not None:
            if page_table.dim() != 2 or page_table.shape[0] != batch:
                raise ValueError(
                    f"{name}: page_table must have shape [{batch}, pages] as in plan(), got "
                    f"{[*page_table.shape]}"
                )
            indptr, indices = list_of_pages(page_table, self.device)
            lengths = lengths._replace(kv_indptr=indptr, kv_indices=indices)
        for option, tensor in (("kv_len", kv_len), ("page_table", page_table)):
            if tensor is not None and (
                tensor.dtype is not torch.int32 or tensor.device != self.device
            ):
                raise ValueError(
                    f"{name}: {option} must be int32 on {self.device}, got "
                    f"{dtype_word(tensor.dtype)} on {tensor.device}"
                )
        if kv_len is not None and kv_len.shape != (batch,):
            raise ValueError(
                f"{name}: kv_len must have shape [{batch}] as in plan(), got {[*kv_len.shape]}"
            )
        if self._use_cuda_graph:
            if lengths.kv_indices is not None:
                self._check_frozen(name, batch, lengths)
            kernels.launch(plan, lengths)
            return
        given = {field: t for field, t in lengths._asdict().items() if t is not None}
        packed = kernels.pack(plan._replace(tables=plan.tables._replace(**given)))
        kernels.launch(packed, Tables())
        self._plan = packed

    @precast_api(trace=_TRACE)
    @documented(RUN)
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: Scale = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: Scale = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Scale = None,
        bmm2_scale: Scale = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention by the latest plan.

        Parameters
        ----------
        profiler_buffer, skip_softmax_threshold_scale_factor : None
            For other backends.
        kv_len : torch.Tensor, optional
            ``[batch_size]``, int32 on the device: other lengths than those of :meth:`plan`, whose
            place they take. One more launch divides the work again.
        page_table : torch.Tensor, optional
            ``[batch_size, pages]``, likewise: other pages.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, and the log-sum-exp if asked for. A query that sees nothing has output 0
            and, without sinks, log-sum-exp minus infinity. With ``use_cuda_graph``, rows of a new
            output that belong to no request are 0.

        Raises
        ------
        precast.errors.PlanMismatchError
            No plan (an ``AssertionError`` and a ``ValueError``).
        NotImplementedError
            An argument for other backends.
        TypeError
            No queries or no cache, or both of their forms.
        ValueError
            Options that are not those of :meth:`plan`; dtypes, heads, pages or a number of queries
            that are not; a shape, dtype, device or strides other than above.

        Notes
        -----
        With ``qo_indptr`` on the device the number of rows of the queries is not checked; rows that
        no request has are left as they are. Scores and sums are float32, outputs are rounded once
        (with ``o_scale`` twice). Safe in CUDA graphs; not differentiable.
        """
        if not (profiler_buffer is skip_softmax_threshold_scale_factor is None):
            running.refuse_options(
                self._name,
                profiler_buffer=profiler_buffer,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            )
        queries = running.parts(self, ("q_nope", "q_pe"), q_nope, q_pe, "query", query)
        caches = running.parts(
            self, ("ckv_cache", "kpe_cache"), ckv_cache, kpe_cache, "kv_cache", kv_cache
        )
        kv_scales = ckv_scale, ckv_scale_arr, kpe_scale
        bmm_scales = bmm1_scale, bmm2_scale
        if not (
            self._contract.is_plain
            and return_lse is return_lse_base_on_e is False
            and lse is o_scale is sinks is ckv_scale is ckv_scale_arr is None
            and kpe_scale is bmm1_scale is bmm2_scale is None
        ):
            lse_options = return_lse, lse, return_lse_base_on_e
            running.check_contract(self, lse_options, o_scale, sinks, kv_scales, bmm_scales)
        if not (kv_len is page_table is None):
            self._divide_for(kv_len, page_table)
        return running.run(
            self,
            queries,
            caches,
            out,
            lse,
            return_lse,
            return_lse_base_on_e,
            o_scale,
            sinks,
            kv_scales,
            bmm_scales,
        )

    _run_arguments = public_arguments(run, f"{_name}.run")
