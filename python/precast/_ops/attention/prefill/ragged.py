# SPDX-License-Identifier: Apache-2.0
"""Prefill over keys and values that lie one request behind the other, without pages.

Sources: Ye et al., FlashInfer, arXiv:2501.01005 (the wrapper); Dao, FlashAttention-2,
arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention import run as running
from precast._ops.attention import validation
from precast._ops.attention._docs import PLAN, RUN, WRAPPER
from precast._ops.attention.backends import sink_arguments
from precast._ops.attention.batch_reference import batch_prefill_with_ragged_kv_cache_reference
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
from precast.api_logging import precast_api

_TRACE = batch_trace(
    "batch_prefill_ragged",
    "Attention of a ragged batch of queries over ragged keys and values.",
    batch_prefill_with_ragged_kv_cache_reference,
    lambda: BatchPrefillWithRaggedKVCacheWrapper,
)


@documented(WRAPPER, PLAN)
class BatchPrefillWithRaggedKVCacheWrapper(PrefillPlan):
    r"""Compute attention of a ragged batch of queries over ragged keys and values.

    The same as :class:`BatchPrefillWithPagedKVCacheWrapper`, but that the tokens of request
    :math:`b` are rows ``kv_indptr[b]`` to ``kv_indptr[b + 1]`` of two tensors. Head dimensions 192
    and 128 are those of MLA's prefill.

    Parameters
    ----------
    kv_layout : str
        ``NHD``, or ``HND`` for keys and values ``[num_kv_heads, tokens, head_dim]``.
    qo_indptr_buf, kv_indptr_buf : torch.Tensor, optional
        ``[batch_size + 1]``, int32 on the device, needed with ``use_cuda_graph``.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1024).byte())
    ...     two = torch.tensor([0, 2], dtype=torch.int32)
    ...     wrapper.plan(two, two, 2, 1, 64, causal=True, q_data_type="float32")
    ...     k = torch.arange(2.0).view(2, 1, 1).expand(2, 1, 64)
    ...     wrapper.run(torch.zeros(2, 2, 64), k, k)[:, 0, 0]
    tensor([0.0000, 0.5000])
    """

    _name = "BatchPrefillWithRaggedKVCacheWrapper"
    _cache_argument = "k"
    _kv_indptr_buf = PlanField("tables", "kv_indptr")
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(batch_prefill_with_ragged_kv_cache_reference)

    @precast_api
    @checked_first
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend,
            jit_args,
            jit_kwargs,
            variant_owns_mask,
            buffers=Tables(qo_indptr_buf, kv_indptr_buf),
            mask=Mask(custom_mask_buf, mask_indptr_buf),
        )
        if not use_cuda_graph:
            return
        buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        validation.check_buffers(self._name, self.device, "cuda graph", **buffers)
        self._check_mask_buffers()
        assert qo_indptr_buf is not None
        assert kv_indptr_buf is not None
        self._fixed_batch_size = len(qo_indptr_buf) - 1
        if len(kv_indptr_buf) != self._fixed_batch_size + 1:
            raise ValueError(
                f"The length of kv_indptr_buf ({len(kv_indptr_buf)}) should be the same as "
                f"qo_indptr_buf ({self._fixed_batch_size + 1})."
            )

    def _plan_rows(self, given: Any) -> None:
        qo_indptr, kv_indptr = given.qo_indptr, given.kv_indptr
        for name in ("v_indptr", "o_indptr"):
            if getattr(given, name) is not None:
                raise NotImplementedError(f"{self._name}.plan: {name} must be None")
        bounds = qo_indptr.shape[0]
        if kv_indptr.shape[0] != bounds:
            raise ValueError(
                f"{self._name}.plan: kv_indptr must have length {bounds} as qo_indptr, got "
                f"{kv_indptr.shape[0]}"
            )
        # Every row belongs to a request, as where all have as many.
        self._plan_batch(given, Tables(qo_indptr, kv_indptr), is_uniform=True)

    @precast_api
    @documented(PLAN)
    @gathers(_plan_rows, UNREAD, page_size=0, block_tables=None)
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Divide the work of a batch, for all runs until the next plan.

        Parameters
        ----------
        qo_indptr, kv_indptr : torch.Tensor
            ``[batch_size + 1]``, int32, on the device or on the host: where the queries, and the
            keys and values, of each request start.
        v_indptr, o_indptr : None
            For other backends: values lie as keys, and outputs as queries.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            Head dimensions or dtypes that no kernel is for (a ``ValueError``).
        NotImplementedError
            ``v_indptr`` or ``o_indptr``.
        ValueError
            Heads that do not divide; indptrs of different lengths; a workspace that is too small
            or not aligned; under CUDA graphs another batch size, more queries than in the first
            plan, or a mask without buffers for it.

        Notes
        -----
        Lengths on the device stay there: nothing is copied to the host or waited for.
        """

    begin_forward = plan

    # -- run --------------------------------------------------------------------------------------

    @precast_api(trace=_TRACE)
    @documented(RUN)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: object = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention by the latest plan.

        Parameters
        ----------
        q : torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; stride 1 in the last dimension, any in
            the others.
        k, v : torch.Tensor
            ``[kv_indptr[-1], num_kv_heads, head_dim]`` in layout ``NHD``, with heads first in
            ``HND``; strides likewise.
        o_scale : float, optional
            Of outputs of 8 bits, which are not written here: None or 1.
        kv_cache_sf : None
            For other backends.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, and the log-sum-exp if asked for. A query that sees nothing has output 0
            and log-sum-exp minus infinity.

        Raises
        ------
        precast.errors.PlanMismatchError
            No plan (an ``AssertionError`` and a ``ValueError``).
        NotImplementedError
            An argument for other backends.
        ValueError
            Dtypes, heads or a number of queries that are not those of :meth:`plan`; a shape, dtype,
            device or strides other than above.

        Notes
        -----
        Sinks are those in the attribute ``_sinks``, None by default. Safe in CUDA graphs; not
        differentiable.
        """
        sinks = None
        if args and self._takes_sinks:
            (sinks, q_scale), args = sink_arguments(self, args, sinks, q_scale), ()
        if args:
            args, q_scale, k_scale, v_scale = running.scale_arguments(
                self, args, q_scale, k_scale, v_scale
            )
        if args or not (kv_cache_sf is o_scale is None):
            is_one = isinstance(o_scale, (int, float)) and o_scale == 1.0
            running.check_other_options(
                self, args, kv_cache_sf=kv_cache_sf, o_scale=None if is_one else o_scale
            )
        finish = None
        if not (return_lse is False and lse_base is running.LOG2 and lse_layout is running.NH):
            finish = running.lse_of(self, q, lse, return_lse, lse_base, lse_layout)
        into = lse if finish is None else finish.buffer
        result, sums = running.run(
            self, q, k, v, q_scale, k_scale, v_scale, out, into, return_lse, sinks, enable_pdl
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
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
