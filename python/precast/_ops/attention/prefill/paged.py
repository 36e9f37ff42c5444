# SPDX-License-Identifier: Apache-2.0
"""Prefill, append and verify: attention of many queries of each request over a paged KV cache.

Sources: Ye et al., FlashInfer, arXiv:2501.01005 (the wrapper); Dao, FlashAttention-2,
arXiv:2307.08691; Kwon et al., arXiv:2309.06180 (pages).
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, TypeAlias

from precast._base.torch import torch
from precast._ops.attention import run as running
from precast._ops.attention import validation
from precast._ops.attention.batch_trace import paged_trace
from precast._ops.attention.plan import Mask, Scores, Tables, scores_of
from precast._ops.attention.prefill.lse import Lse
from precast._ops.attention.prefill.paged_plan import PagedPrefillPlan
from precast._ops.attention.prefill.reference import batch_prefill_with_paged_kv_cache_reference
from precast._ops.attention.signature import arguments_of
from precast.api_logging import precast_api

Cache: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
Scale: TypeAlias = "float | torch.Tensor | None"


_TRACE = paged_trace(
    "batch_prefill",
    "Attention of a ragged batch of queries over a paged KV cache.",
    batch_prefill_with_paged_kv_cache_reference,
    lambda: BatchPrefillWithPagedKVCacheWrapper,
    decode=False,
)


class BatchPrefillWithPagedKVCacheWrapper(PagedPrefillPlan):
    r"""Attention of a ragged batch of queries over a paged KV cache.

    .. math::

        O_{i, h} = \sum_j \mathrm{softmax}_j(s_{i, h, j}) V_{j, h'}, \quad
        s_{i, h, j} = \mathrm{cap}(sm\_scale \cdot Q_{i, h} \cdot K_{j, h'} + bias) + mask_{i, j}

    where :math:`j` runs over the tokens of the request of query :math:`i` and
    :math:`h' = \lfloor h / (H_{qo} / H_{kv}) \rfloor`. :meth:`plan` divides the work of a batch
    among the SMs, :meth:`run` does it, once for each layer.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        uint8 or int8 on the device of the tensors, contiguous, 16-byte aligned: place for partial
        results; :meth:`workspace_size` says how much. May hold anything.
    kv_layout : str
        ``NHD`` or ``HND``.
    use_cuda_graph : bool
        Whether :meth:`run` is captured; then the batch size is that of the buffers below, and
        :meth:`plan` copies into them.
    qo_indptr_buf, paged_kv_indptr_buf : torch.Tensor, optional
        ``[batch_size + 1]``, int32 on the device, needed with ``use_cuda_graph``.
    paged_kv_indices_buf : torch.Tensor, optional
        int32, as many pages as there ever are.
    paged_kv_last_page_len_buf : torch.Tensor, optional
        ``[batch_size]``, int32.
    custom_mask_buf, mask_indptr_buf : torch.Tensor, optional
        uint8 and int32 ``[batch_size + 1]``, needed for masks with ``use_cuda_graph``.
    backend : str
        ``auto`` or ``fa2``, which are the same.
    jit_args, jit_kwargs : None
        There is no code to add: kernels are compiled ahead of time.
    variant_owns_mask : bool
        False; it says that such code masks.

    Raises
    ------
    precast.errors.BackendSupportedError
        Another backend, ``fa3`` among them until it exists.
    precast.errors.CacheLayoutError
        Another layout (a ``KeyError`` and a ``ValueError``).
    NotImplementedError
        ``jit_args``.
    ValueError
        A workspace that is not aligned; with ``use_cuda_graph``, a missing buffer;
        ``variant_owns_mask``.

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
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(batch_prefill_with_paged_kv_cache_reference)

    @precast_api
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
            buffers=lengths,
            mask=Mask(custom_mask_buf, mask_indptr_buf),
        )
        validation.check_no_variant(self._name, variant_owns_mask)
        if not use_cuda_graph:
            return
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        for name, buffer in buffers.items():
            if not isinstance(buffer, torch.Tensor):
                raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
        assert qo_indptr_buf is not None
        self._fixed_batch_size = len(qo_indptr_buf) - 1
        for name, more in (("paged_kv_indptr_buf", 1), ("paged_kv_last_page_len_buf", 0)):
            size = len(buffers[name])  # type: ignore[arg-type]
            if size != self._fixed_batch_size + more:
                raise ValueError(
                    f"The length of {name} should be batch_size{' + 1' if more else ''}: "
                    f"{self._fixed_batch_size + more} for qo_indptr_buf, got {size}"
                )

    @precast_api(trace=_TRACE)
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
        """Attention by the latest plan.

        Parameters
        ----------
        q : torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; stride 1 in the last dimension, any in
            the others.
        paged_kv_cache : torch.Tensor or tuple of torch.Tensor
            ``[pages, 2, page_size, num_kv_heads, head_dim]`` in layout ``NHD``,
            ``[pages, 2, num_kv_heads, page_size, head_dim]`` in ``HND``, or a tuple of keys and
            values without the dimension of 2. Page size 1 may be left out of the shape. Stride 1
            in the last dimension, any in the others.
        *args
            None: there is no code to pass them to.
        q_scale, k_scale : float or torch.Tensor, optional
            Multiply ``sm_scale``. A tensor on the device is one positive float32 and is read there.
        v_scale : float or torch.Tensor, optional
            Multiplies the output in float32, before it is rounded.
        out, lse : torch.Tensor, optional
            Where to write: ``[tokens, num_qo_heads, head_dim_vo]`` and, float32, the log-sum-exp.
            Default: new ones.
        return_lse : bool
            Whether to return the log-sum-exp of the logits, too.
        lse_base : str
            ``log2`` or ``ln``.
        lse_layout : str
            ``NH``, ``[tokens, num_qo_heads]``, or ``HN``, the other way round, by a kernel of its
            own.
        enable_pdl : bool, optional
            Programmatic dependent launch. Default: on; without effect below capability 9.0.
        window_left : int, optional
            That of :meth:`plan`, which is the default.
        sinks : torch.Tensor, optional
            ``[num_qo_heads]``, float32: a logit (base e, not scaled) that takes its share of each
            softmax and has no value.
        kv_cache_sf, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress : None
            For other backends.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, and the log-sum-exp if asked for. A query that sees nothing has output 0
            and, without sinks, log-sum-exp minus infinity. With ``use_cuda_graph``, rows of a new
            output that belong to no request are 0, unless :meth:`plan` had ``uniform_q_len``.

        Raises
        ------
        precast.errors.PlanMismatchError
            No plan, or another ``window_left`` (an ``AssertionError`` and a ``ValueError``).
        precast.errors.CacheLayoutError
            A cache that is neither a tensor nor a tuple of two (a ``KeyError`` and a
            ``ValueError``).
        NotImplementedError
            An argument for other backends.
        ValueError
            Dtypes, heads, pages or a number of queries that are not those of :meth:`plan`; a shape,
            dtype, device or strides other than above.

        Notes
        -----
        With ``qo_indptr`` on the device nobody knows whether ``q`` has the right number of rows;
        rows that no request has are left as they are. Safe in CUDA graphs; not differentiable.
        """
        if window_left is not None:
            running.check_window(self, window_left)
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
        finish = Lse(lse_base, lse_layout, lse, q) if return_lse else None
        k, v = paged_kv_cache, None
        if isinstance(k, tuple):
            k, v = running.split_cache(self, k)
        into = None if finish is None else finish.buffer
        result, sums = running.run(
            self, q, k, v, q_scale, k_scale, v_scale, out, into, return_lse, sinks, enable_pdl
        )
        if finish is None or sums is None:
            return result
        return result, finish(sums)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    # -- deprecated -------------------------------------------------------------------------------

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
        """:meth:`run`, with options that :meth:`plan` has now, too."""
        self._take_options(
            Scores(
                causal,
                window_left,
                logits_soft_cap or 0.0,
                sm_scale,
                pos_encoding_mode,
                rope_scale,
                rope_theta,
                use_fp16_qk_reduction,
            )
        )
        out = self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)
        assert isinstance(out, torch.Tensor)
        return out

    @arguments_of(forward)
    def forward_return_lse(self, given: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`run_return_lse`, with options that :meth:`plan` has now, too."""
        self._take_options(scores_of(given))
        both = self.run(
            given.q,
            given.paged_kv_cache,
            return_lse=True,
            k_scale=given.k_scale,
            v_scale=given.v_scale,
        )
        assert isinstance(both, tuple)
        return both

    def end_forward(self) -> None:
        """Nothing; older engines call it."""
