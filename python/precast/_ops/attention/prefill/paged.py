# SPDX-License-Identifier: Apache-2.0
"""Prefill, append and verify: attention of many queries of each request over a paged KV cache.

Sources: Ye et al., FlashInfer, arXiv:2501.01005 (the wrapper); Dao, FlashAttention-2,
arXiv:2307.08691; Kwon et al., arXiv:2309.06180 (pages).
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention import kernels, validation
from precast._ops.attention import run as running
from precast._ops.attention._docs import PAGED_RUN, PLAN, RUN, WRAPPER
from precast._ops.attention.backends import sink_arguments
from precast._ops.attention.batch_reference import batch_prefill_with_paged_kv_cache_reference
from precast._ops.attention.plan import Dtype, Mask, PlanField, Tables
from precast._ops.attention.prefill.plan import FORWARD_UNREAD, UNREAD, PrefillPlan
from precast._ops.attention.run import Scale
from precast._ops.attention.signature import (
    arguments_of,
    checked_first,
    gathers,
    public_arguments,
    returning_lse,
)
from precast._ops.attention.trace import batch_trace
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api

_TRACE = batch_trace(
    "batch_prefill",
    "Attention of a ragged batch of queries over a paged KV cache.",
    batch_prefill_with_paged_kv_cache_reference,
    lambda: BatchPrefillWithPagedKVCacheWrapper,
)


@documented(WRAPPER, PLAN)
class BatchPrefillWithPagedKVCacheWrapper(PrefillPlan):
    r"""Compute attention of a ragged batch of queries over a paged KV cache.

    .. math::

        O_{i, h} = \sum_j \mathrm{softmax}_j(s_{i, h, j}) V_{j, h'}, \quad
        s_{i, h, j} = \mathrm{cap}(sm\_scale \cdot Q_{i, h} \cdot K_{j, h'} + bias) + mask_{i, j}

    where :math:`j` runs over the tokens of the request of query :math:`i` and
    :math:`h' = \lfloor h / (H_{qo} / H_{kv}) \rfloor`. :meth:`plan` divides the work of a batch
    among the SMs, :meth:`run` does it, once for each layer.

    Parameters
    ----------
    qo_indptr_buf, paged_kv_indptr_buf : torch.Tensor, optional
        ``[batch_size + 1]``, int32 on the device, needed with ``use_cuda_graph``.
    paged_kv_indices_buf : torch.Tensor, optional
        int32, as many pages as there ever are.
    paged_kv_last_page_len_buf : torch.Tensor, optional
        ``[batch_size]``, int32.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1024).byte())
    ...     two = torch.tensor([0, 2], dtype=torch.int32)
    ...     table = two, two[1:] * 0 + two[:2], two[1:] * 0 + 1
    ...     wrapper.plan(two, *table, 2, 1, 64, 1, causal=True, q_data_type="float32")
    ...     cache = torch.arange(3.0).view(3, 1, 1, 1, 1).expand(3, 2, 1, 1, 64)
    ...     wrapper.run(torch.zeros(2, 2, 64), cache)[:, 0, 0]
    tensor([0., 1.])
    """

    _name = "BatchPrefillWithPagedKVCacheWrapper"
    _takes_kv_cache_sf = True
    _paged_kv_indptr_buf = PlanField("tables", "kv_indptr")
    _paged_kv_indices_buf = PlanField("tables", "kv_indices")
    _paged_kv_last_page_len_buf = PlanField("tables", "kv_last_page_len")
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(batch_prefill_with_paged_kv_cache_reference)

    @precast_api
    @checked_first
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        lengths = Tables(
            qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf, paged_kv_indices_buf
        )
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend,
            jit_args,
            jit_kwargs,
            variant_owns_mask,
            buffers=lengths,
            mask=Mask(custom_mask_buf, mask_indptr_buf),
        )
        if not use_cuda_graph:
            return
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        validation.check_buffers(self._name, self.device, "CUDA graph", **buffers)
        self._check_mask_buffers()
        assert qo_indptr_buf is not None
        self._fixed_batch_size = len(qo_indptr_buf) - 1
        for name, more in (("paged_kv_indptr_buf", 1), ("paged_kv_last_page_len_buf", 0)):
            size = len(buffers[name])  # type: ignore[arg-type]
            if size != self._fixed_batch_size + more:
                raise ValueError(
                    f"The length of {name} should be batch_size{' + 1' if more else ''}: "
                    f"{self._fixed_batch_size + more} for qo_indptr_buf, got {size}"
                )

    def _plan_pages(self, given: Any) -> None:
        validation.check_page_size(f"{self._name}.plan", given.page_size)
        lengths = Tables(
            given.qo_indptr,
            given.paged_kv_indptr,
            given.paged_kv_last_page_len,
            given.paged_kv_indices,
        )
        self._plan_batch(given, lengths, bool(given.uniform_q_len))

    @precast_api
    @documented(PLAN)
    @gathers(_plan_pages, (*UNREAD, "block_tables"))
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: Dtype = None,
        o_data_type: Dtype = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Divide the work of a batch, for all runs until the next plan.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``[batch_size + 1]``, int32, on the device or on the host: where the queries of each
            request start.
        paged_kv_indptr : torch.Tensor
            ``[batch_size + 1]``, likewise: where its pages start in ``paged_kv_indices``.
        paged_kv_indices : torch.Tensor
            int32, at least ``paged_kv_indptr[-1]``: the pages; what is behind them is not read.
        paged_kv_last_page_len : torch.Tensor
            ``[batch_size]``, int32: tokens in the last page of each request, 0 if it has none.
            They include the tokens of the queries.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            A head dimension or dtype that no kernel is for (a ``ValueError``).
        ValueError
            Heads that do not divide; a workspace that is too small or not aligned; under CUDA
            graphs another batch size, more queries than in the first plan, more indices than the
            buffer has, or a mask without buffers for it.

        Notes
        -----
        Lengths on the device stay there: nothing is copied to the host or waited for.
        """

    begin_forward = plan

    @arguments_of(plan, without=("non_blocking",), checks_first=True)
    def workspace_size(self, given: Any) -> tuple[int, int]:
        """Count the bytes of workspaces for such a plan, as :meth:`plan` takes its arguments.

        Returns
        -------
        tuple of int
            Of the float and of the int workspace; zeros in reference mode, which needs none.

        Raises
        ------
        ValueError
            As :meth:`plan`.

        Notes
        -----
        Nothing on the device is allocated or changed. Lengths on the device are waited for. A
        float workspace that is too small for other lengths costs time, not results: then less is
        divided among SMs. With ``fixed_split_size`` parts become longer then, which other lengths
        in the batch decide: take what the largest batch needs.
        """
        validation.check_page_size(f"{self._name}.workspace_size", given.page_size)
        _, shape, _ = self._shape(given, "workspace_size")
        lengths = Tables(given.qo_indptr, given.paged_kv_indptr, given.paged_kv_last_page_len)
        return kernels.workspace_bytes(self.device, shape, lengths)

    # -- run --------------------------------------------------------------------------------------

    @precast_api(trace=_TRACE)
    @documented(RUN, PAGED_RUN)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Cache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention by the latest plan.

        Parameters
        ----------
        q : torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; stride 1 in the last dimension, any in
            the others.
        skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress : None
            For other backends.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, and the log-sum-exp if asked for. A query that sees nothing has output 0
            and, without sinks, log-sum-exp minus infinity. With ``use_cuda_graph``, rows of a new
            output that belong to no request are 0, unless :meth:`plan` had ``uniform_q_len``.

        Notes
        -----
        With ``qo_indptr`` on the device the number of rows of ``q`` is not checked; rows that no
        request has are left as they are. Safe in CUDA graphs; not differentiable.
        """
        if window_left is not None:
            running.check_window(self, window_left)
        if args and self._takes_sinks:
            (sinks, q_scale), args = sink_arguments(self, args, sinks, q_scale), ()
        if args:
            args, q_scale, k_scale, v_scale = running.scale_arguments(
                self, args, q_scale, k_scale, v_scale
            )
        scales = kv_cache_sf
        if self._plan.model.is_packed:
            kv_cache_sf = None  # No option of other backends.
        if args or not (
            kv_cache_sf
            is skip_softmax_threshold_scale_factor
            is use_fp16_softmax
            is uses_spcompress
            is None
        ):
            running.check_other_options(
                self,
                args,
                kv_cache_sf=kv_cache_sf,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                use_fp16_softmax=use_fp16_softmax,
                uses_spcompress=uses_spcompress,
            )
        finish = None
        if not (return_lse is False and lse_base is running.LOG2 and lse_layout is running.NH):
            finish = running.lse_of(self, q, lse, return_lse, lse_base, lse_layout)
        k, v = paged_kv_cache, None
        if isinstance(k, tuple):
            k, v = running.split_cache(self, k)
        into = lse if finish is None else finish.buffer
        result, sums = running.run(
            self,
            q,
            k,
            v,
            q_scale,
            k_scale,
            v_scale,
            out,
            into,
            return_lse,
            sinks,
            enable_pdl,
            scales,
        )
        if finish is None or sums is None:
            return result
        return result, finish(sums)

    run_return_lse = returning_lse(run)
    _run_arguments = public_arguments(run, f"{_name}.run")

    # -- deprecated -------------------------------------------------------------------------------

    @gathers(PrefillPlan._forward, FORWARD_UNREAD)
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Call :meth:`run` with options that :meth:`plan` has now, too."""

    @arguments_of(forward, unread=FORWARD_UNREAD)
    def forward_return_lse(self, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call :meth:`run_return_lse` with options that :meth:`plan` has now, too."""
        both: tuple[torch.Tensor, torch.Tensor] = self._forward(given, return_lse=True)
        return both
