# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a paged KV cache: one query of each request, or a few.

Sources: Ye et al., FlashInfer, arXiv:2501.01005 (the wrapper); Kwon et al., arXiv:2309.06180
(pages); Osama et al., Stream-K, arXiv:2301.03598 (the division of work).
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention import kernels, validation
from precast._ops.attention import run as running
from precast._ops.attention._docs import PAGED_RUN, PLAN, RUN, WRAPPER
from precast._ops.attention.backends import sink_arguments
from precast._ops.attention.batch_reference import batch_decode_with_paged_kv_cache_reference
from precast._ops.attention.decode.plan import UNREAD, DecodePlan
from precast._ops.attention.plan import Dtype, PlanField, Tables
from precast._ops.attention.run import Scale
from precast._ops.attention.signature import (
    arguments_of,
    checked_first,
    gathers,
    options_by_position,
    public_arguments,
    returning_lse,
)
from precast._ops.attention.trace import batch_trace
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api

_TRACE = batch_trace(
    "batch_decode",
    "Attention of the newest tokens of a batch over a paged KV cache.",
    batch_decode_with_paged_kv_cache_reference,
    lambda: BatchDecodeWithPagedKVCacheWrapper,
)


@documented(WRAPPER, PLAN)
class BatchDecodeWithPagedKVCacheWrapper(DecodePlan):
    r"""Compute attention of the newest tokens of a batch over a paged KV cache.

    .. math::

        O_{b, h} = \sum_j \mathrm{softmax}_j(s_{b, h, j}) V_{b, j, h'}, \quad
        s_{b, h, j} = \mathrm{cap}(sm\_scale \cdot Q_{b, h} \cdot K_{b, j, h'})

    where :math:`h' = \lfloor h / (H_{qo} / H_{kv}) \rfloor`. :meth:`plan` divides the work of a
    batch among the SMs, :meth:`run` does it, once for each layer.

    Parameters
    ----------
    use_tensor_cores : bool
        Kernels use tensor cores in any case. True allows ``q_len_per_req`` and
        ``fixed_split_size``.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : torch.Tensor
        With ``use_cuda_graph``, int32 on the device: ``[batch_size + 1]``, as many as there ever
        are, ``[batch_size]``.

    Notes
    -----
    With lengths on the device :meth:`plan` copies nothing to the host and waits for nothing, so it
    may be captured together with :meth:`run`.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024).byte())
    ...     one = torch.ones(1, dtype=torch.int32)
    ...     wrapper.plan(torch.arange(2).int(), one - 1, one, 2, 1, 64, 1, q_data_type="float32")
    ...     wrapper.run(torch.ones(1, 2, 64), torch.full((1, 2, 1, 1, 64), 3.0)).unique()
    tensor([3.])
    """

    _name = "BatchDecodeWithPagedKVCacheWrapper"
    _takes_kv_cache_sf = True
    _paged_kv_indptr_buf = PlanField("tables", "kv_indptr")
    _paged_kv_indices_buf = PlanField("tables", "kv_indices")
    _paged_kv_last_page_len_buf = PlanField("tables", "kv_last_page_len")
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(batch_decode_with_paged_kv_cache_reference)

    @precast_api
    @checked_first
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        indptr, indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        last_page_len, qo_indptr, batch_size = paged_kv_last_page_len_buffer, None, 0
        if use_cuda_graph:
            validation.check_buffers(
                self._name,
                float_workspace_buffer.device,
                "cudagraph",
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_page_len,
            )
            assert last_page_len is not None
            assert indptr is not None
            batch_size = len(last_page_len)
            if len(indptr) != batch_size + 1:
                raise ValueError(
                    f"The size of paged_kv_indptr_buffer should be batch_size + 1: "
                    f"{batch_size + 1} for paged_kv_last_page_len_buffer, got {len(indptr)}"
                )
            if use_tensor_cores:
                device = float_workspace_buffer.device
                qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend,
            jit_args,
            buffers=Tables(qo_indptr, indptr, last_page_len, indices),
        )
        self._fixed_batch_size = batch_size
        self._use_tensor_cores = use_tensor_cores

    @property
    def use_tensor_cores(self) -> bool:
        """Whether ``q_len_per_req`` and ``fixed_split_size`` are allowed."""
        return self._use_tensor_cores

    @property
    def resolved_backend(self) -> str:
        """Return the backend that runs, ``fa2``."""
        return "fa2"

    # -- plan -------------------------------------------------------------------------------------

    @precast_api
    @options_by_position
    @documented(PLAN)
    @gathers(DecodePlan._plan_batch, UNREAD, use_fp16_qk_reduction=False)
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype = None,
        o_data_type: Dtype = None,
        data_type: Dtype = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        """Divide the work of a batch, for all runs until the next plan.

        Parameters
        ----------
        indptr : torch.Tensor
            ``[batch_size + 1]``, int32, on the device or on the host: where the pages of each
            request start in ``indices``.
        indices : torch.Tensor
            int32, at least ``indptr[-1]``: the pages; what is behind them is not read.
        last_page_len : torch.Tensor
            ``[batch_size]``, int32: tokens in the last page of each request, 0 if it has none.
        head_dim : int
            64, 80, 96, 128, 256 or 512.
        *deprecated_positional_args
            The options by position, in FlashInfer's order; a ``DeprecationWarning``.
        window_right : int
            0; nothing is seen behind the newest token.
        q_data_type, kv_data_type, o_data_type, data_type : torch.dtype or str, optional
            Of queries (float16, bfloat16, float8_e4m3fn or float8_e5m2), of keys and values
            (float16 or bfloat16 as queries, of 8 bits, or uint8 for NVFP4 with ``head_dim`` 64, 128
            or 256; default: as queries), of outputs
            (float16, bfloat16 or float32; default: as queries, so it must be given for queries of
            8 bits), and of both where they are None. Each run converts queries of 8 bits to 16, by
            one more launch and into a new tensor, unless kernels for Hopper multiply them as they
            are: e4m3 with keys and values of e4m3, for many rows of a request.
        q_len_per_req : int
            Queries of every request, its newest tokens; each sees what is before it.
        is_causal : bool, optional
            ``q_len_per_req > 1``, which is the default.

        Raises
        ------
        precast.errors.UnsupportedConfigError
            A ``head_dim`` or dtype that no kernel is for (a ``ValueError``).
        NotImplementedError
            ``window_right`` or ``is_causal`` of another value.
        ValueError
            Heads that do not divide; ``q_len_per_req > 1`` or ``fixed_split_size`` without
            ``use_tensor_cores``; lengths on the host with fewer tokens than ``q_len_per_req``;
            under CUDA graphs another batch size or ``q_len_per_req``, or more indices than the
            buffer has; a workspace that is too small or not aligned.
        """

    begin_forward = plan

    @arguments_of(plan, without=("non_blocking", "window_right", "is_causal"), checks_first=True)
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
        As for :meth:`BatchPrefillWithPagedKVCacheWrapper.workspace_size`.
        """
        _, shape = self._shape(given, "workspace_size")
        lengths = Tables(None, given.indptr, given.last_page_len)
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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention by the latest plan.

        Parameters
        ----------
        q : torch.Tensor
            ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``; stride 1 in the last
            dimension, any in the others.
        out, lse : torch.Tensor, optional
            Where to write: ``[tokens, num_qo_heads, head_dim]`` and, float32,
            ``[tokens, num_qo_heads]``. Default: new ones.
        q_len_per_req : int, optional
            Deprecated; pass it to :meth:`plan`.
        skip_softmax_threshold_scale_factor : None
            For other backends.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, and the log-sum-exp if asked for. A request without tokens has output 0
            and, without sinks, log-sum-exp minus infinity.

        Notes
        -----
        Safe in CUDA graphs; not differentiable.
        """
        if q_len_per_req is not None:
            running.check_options(self, q=q, q_len_per_req=q_len_per_req)
            self._check_q_len(q.shape[0], q_len_per_req)
        if window_left is not None:
            running.check_window(self, window_left)
        if args and self._takes_sinks:
            (sinks, q_scale), args = sink_arguments(self, args, sinks, q_scale), ()
        scales = kv_cache_sf
        if self._plan.model.is_packed:
            kv_cache_sf = None  # No option of other backends.
        if args or not (kv_cache_sf is skip_softmax_threshold_scale_factor is None):
            running.check_other_options(
                self,
                args,
                kv_cache_sf=kv_cache_sf,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            )
        k, v = paged_kv_cache, None
        if isinstance(k, tuple):
            k, v = running.split_cache(self, k)
        result, sums = running.run(
            self,
            q,
            k,
            v,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
            return_lse,
            sinks,
            enable_pdl,
            scales,
        )
        return result if sums is None else (result, sums)

    run_return_lse = returning_lse(run)
    _run_arguments = public_arguments(run, f"{_name}.run")

    # -- deprecated -------------------------------------------------------------------------------

    @gathers(DecodePlan._forward, ("window_left",))
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Call :meth:`run` with options that :meth:`plan` has now, too."""

    @arguments_of(forward, unread=("window_left",))
    def forward_return_lse(self, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call :meth:`run_return_lse` with options that :meth:`plan` has now, too."""
        both: tuple[torch.Tensor, torch.Tensor] = self._forward(given, return_lse=True)
        return both
