# SPDX-License-Identifier: Apache-2.0
"""Paged prefill whose runs take attention sinks by position, as gpt-oss models are called.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._ops.attention.backends import sink_arguments
from precast._ops.attention.batch_reference import batch_attention_with_sinks_reference
from precast._ops.attention.plan import Dtype
from precast._ops.attention.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from precast._ops.attention.prefill.trace import sink_trace
from precast._ops.attention.run import Scale
from precast._ops.attention.signature import checked_first, public_arguments, returning_lse
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api

_TRACE = sink_trace(
    batch_attention_with_sinks_reference, lambda: BatchAttentionWithAttentionSinkWrapper
)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    r""":class:`BatchPrefillWithPagedKVCacheWrapper` with ``run(q, cache, sink, sm_scale)``.

    A sink is a logit of a head that takes a share of the softmax and has no value:

    .. math:: o = \frac{\sum_j e^{s_j} v_j}{e^{sink} + \sum_j e^{s_j}}

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph : torch.Tensor, str, bool
        As for :class:`BatchPrefillWithPagedKVCacheWrapper`, and so are the buffers.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf : torch.Tensor, optional
        For CUDA graphs.
    paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf : torch.Tensor, optional
        For CUDA graphs.
    backend : str
        ``auto``, ``fa2`` or ``fa3``.
    pos_encoding_mode, use_fp16_qk_reduction, q_data_type, kv_data_type : optional
        With the next three, what another library compiles a kernel for. Not read: :meth:`plan`
        says them.
    head_dim_qk, head_dim_vo, window_left : int
        As above.

    Raises
    ------
    ValueError
        As for :class:`BatchPrefillWithPagedKVCacheWrapper`.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchAttentionWithAttentionSinkWrapper(torch.empty(1024).byte())
    ...     one = torch.tensor([0, 1], dtype=torch.int32)
    ...     wrapper.plan(one, one, one[:1], one[1:], 2, 1, 64, 1, q_data_type="float32")
    ...     cache = torch.ones(1, 2, 1, 1, 64)
    ...     sink = torch.tensor([0.0, -torch.inf])
    ...     wrapper.run(torch.zeros(1, 2, 64), cache, sink, 0.125)[:, :, 0]
    tensor([[0.5000, 1.0000]])
    """

    _name = "BatchAttentionWithAttentionSinkWrapper"
    _takes_sinks = True
    #: The same in plain PyTorch, in one call.
    reference = staticmethod(  # type: ignore[assignment]
        batch_attention_with_sinks_reference
    )
    _run_arguments = public_arguments(BatchPrefillWithPagedKVCacheWrapper.run, f"{_name}.run")

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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Dtype = "bfloat16",
        kv_data_type: Dtype = "bfloat16",
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )

    @precast_api(trace=_TRACE)
    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        sink: torch.Tensor | None = None,
        sm_scale: float | None = None,
        *,
        q_scale: Scale = None,
        return_lse: bool = False,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention by the latest plan, with sinks.

        Parameters
        ----------
        q, paged_kv_cache
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.
        sink : torch.Tensor, optional
            ``[num_qo_heads]``, float32: the logit of each head. Default: that of ``sinks=``, or
            none.
        sm_scale : float, optional
            The scale of the logits, in the place of the plan's. Default: the plan's.
        q_scale, return_lse, sinks, **options
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            As of :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.

        Raises
        ------
        TypeError, ValueError
            As there; if ``sink`` and ``sinks`` are both given, or ``sm_scale`` is not finite.
        """
        sinks, q_scale = sink_arguments(self, (sink, sm_scale), sinks, q_scale)
        return super().run(
            q, paged_kv_cache, q_scale=q_scale, return_lse=return_lse, sinks=sinks, **options
        )

    run_return_lse = returning_lse(run)
