# SPDX-License-Identifier: Apache-2.0
"""The wrappers of decode and prefill in plain PyTorch: one plan and one run."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention._docs import PLAN, REFERENCE, RUN
from precast._ops.attention.lengths import pairs_of_requests
from precast._ops.attention.reference import paged_requests, ragged_requests, reference_outputs
from precast._ops.paged._cache import Cache, entries_of, halves
from precast._ops.quantize._reference_nvfp4 import nvfp4_dequantized


def batch_decode_with_paged_kv_cache_reference(
    q: torch.Tensor,
    paged_kv_cache: Cache,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    q_len_per_req: int = 1,
    return_lse: bool = True,
    o_dtype: torch.dtype | None = None,
    kv_cache_sf: Cache | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:class:`BatchDecodeWithPagedKVCacheWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q : torch.Tensor
        ``[batch_size * q_len_per_req, heads, head_dim]``, any device.
    indptr, indices, last_page_len : torch.Tensor
        The page table, as for ``plan``.
    q_len_per_req : int
        As for ``plan``.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.ones(1, 2, 4), torch.full((1, 2, 1, 1, 4), 3.0)
    >>> table = torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1])
    >>> batch_decode_with_paged_kv_cache_reference(q, cache, *table)[0].unique()
    tensor([3.])
    """
    if kv_cache_sf is not None:
        paged_kv_cache = nvfp4_dequantized(paged_kv_cache, kv_cache_sf)
    k, v = (entries_of(part, kv_layout == "HND") for part in halves(paged_kv_cache))
    bounds = [i * q_len_per_req for i in range(indptr.numel())]
    requests = paged_requests(k, v, bounds, indptr, indices, last_page_len)
    return reference_outputs(
        q,
        requests,
        v.shape[-1],
        causal=q_len_per_req > 1,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        return_lse=return_lse,
        o_dtype=o_dtype,
    )


def batch_prefill_with_paged_kv_cache_reference(
    q: torch.Tensor,
    paged_kv_cache: Cache,
    qo_indptr: torch.Tensor,
    paged_kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    prefix_len_ptr: torch.Tensor | None = None,
    token_pos_in_items_ptr: torch.Tensor | None = None,
    token_pos_in_items_len: int = 0,
    return_lse: bool = True,
    o_dtype: torch.dtype | None = None,
    kv_cache_sf: Cache | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:class:`BatchPrefillWithPagedKVCacheWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q : torch.Tensor
        ``[qo_indptr[-1], heads, head_dim_qk]``, any device.
    qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor
        The batch, as for ``plan``.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.zeros(2, 2, 4), torch.arange(2.0).view(2, 1, 1, 1, 1).expand(2, 2, 1, 1, 4)
    >>> batch = torch.tensor([0, 2]), torch.tensor([0, 2]), torch.tensor([1, 0]), torch.tensor([1])
    >>> wrapped = batch_prefill_with_paged_kv_cache_reference(q, cache, *batch, causal=True)
    >>> wrapped[0][:, 0, 0]
    tensor([1.0000, 0.5000])
    """
    if kv_cache_sf is not None:
        paged_kv_cache = nvfp4_dequantized(paged_kv_cache, kv_cache_sf)
    k, v = (entries_of(part, kv_layout == "HND") for part in halves(paged_kv_cache))
    table = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
    sizes = pairs_of_requests(qo_indptr, paged_kv_indptr, paged_kv_last_page_len, k.shape[1])
    requests = paged_requests(k, v, qo_indptr.tolist(), *table)
    return reference_outputs(
        q,
        requests,
        v.shape[-1],
        sizes,
        causal=causal,
        custom_mask=custom_mask,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        prefix_len_ptr=prefix_len_ptr,
        token_pos_in_items_ptr=token_pos_in_items_ptr,
        token_pos_in_items_len=token_pos_in_items_len,
        return_lse=return_lse,
        o_dtype=o_dtype,
    )


def batch_prefill_with_ragged_kv_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_layout: str = "NHD",
    custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    prefix_len_ptr: torch.Tensor | None = None,
    token_pos_in_items_ptr: torch.Tensor | None = None,
    token_pos_in_items_len: int = 0,
    return_lse: bool = True,
    o_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:class:`BatchPrefillWithRaggedKVCacheWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q, k, v : torch.Tensor
        As for ``run``, any device.
    qo_indptr, kv_indptr : torch.Tensor
        The batch, as for ``plan``.

    Examples
    --------
    >>> import torch
    >>> q, k = torch.zeros(2, 2, 4), torch.arange(2.0).view(2, 1, 1).expand(2, 1, 4)
    >>> two = torch.tensor([0, 2])
    >>> batch_prefill_with_ragged_kv_cache_reference(q, k, k, two, two, causal=True)[0][:, 0, 0]
    tensor([0.0000, 0.5000])
    """
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    sizes = pairs_of_requests(qo_indptr, kv_indptr, None, 0)
    requests = ragged_requests(k, v, qo_indptr.tolist(), kv_indptr)
    return reference_outputs(
        q,
        requests,
        v.shape[-1],
        sizes,
        causal=causal,
        custom_mask=custom_mask,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        prefix_len_ptr=prefix_len_ptr,
        token_pos_in_items_ptr=token_pos_in_items_ptr,
        token_pos_in_items_len=token_pos_in_items_len,
        return_lse=return_lse,
        o_dtype=o_dtype,
    )


def batch_attention_reference(
    q: torch.Tensor,
    kv_cache: Cache,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    kv_layout: str = "NHD",
    causal: bool = False,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:class:`BatchAttention` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q : torch.Tensor
        ``[qo_indptr[-1], heads, head_dim]``, any device.
    kv_cache : torch.Tensor or tuple of torch.Tensor
        As for ``run``.
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : torch.Tensor
        The batch, as for ``plan``.

    Returns
    -------
    tuple of torch.Tensor
        The output and the log-sum-exp.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.zeros(1, 2, 4), torch.arange(2.0).view(1, 1, 2, 1, 1).expand(1, 2, 2, 1, 4)
    >>> one = torch.tensor([0, 1])
    >>> batch_attention_reference(q, cache, one, one, one[:1], one[1:] + 1)[0][:, 0, 0]
    tensor([0.5000])
    """
    k, v = (entries_of(part, kv_layout == "HND") for part in halves(kv_cache))
    bounds = qo_indptr.tolist()
    requests = paged_requests(k, v, bounds, kv_indptr, kv_indices, None, kv_len_arr)
    both: tuple[torch.Tensor, torch.Tensor] = reference_outputs(
        q,
        requests,
        v.shape[-1],
        causal=causal,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        return_lse=True,
        o_dtype=None,
    )
    return both


def batch_attention_with_sinks_reference(
    q: torch.Tensor,
    paged_kv_cache: Cache,
    sink: torch.Tensor,
    sm_scale: float,
    qo_indptr: torch.Tensor,
    paged_kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:class:`BatchAttentionWithAttentionSinkWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q, paged_kv_cache, sink, sm_scale
        As for ``run``, any device.
    qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor
        The batch, as for ``plan``.

    Examples
    --------
    >>> import torch
    >>> q, cache, one = torch.zeros(1, 1, 4), torch.ones(1, 2, 1, 1, 4), torch.tensor([0, 1])
    >>> table = one, one, one[:1], one[1:]
    >>> batch_attention_with_sinks_reference(q, cache, torch.zeros(1), 0.5, *table)[:, 0, 0]
    tensor([0.5000])
    """
    return batch_prefill_with_paged_kv_cache_reference(
        q,
        paged_kv_cache,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        kv_layout,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        sinks=sink,
        return_lse=return_lse,
    )


# Not by a decorator, which would be a part of the source in a trace.
for _reference in (
    batch_decode_with_paged_kv_cache_reference,
    batch_prefill_with_paged_kv_cache_reference,
    batch_prefill_with_ragged_kv_cache_reference,
    batch_attention_reference,
    batch_attention_with_sinks_reference,
):
    documented(REFERENCE, PLAN, RUN)(_reference)
