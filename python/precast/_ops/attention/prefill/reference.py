# SPDX-License-Identifier: Apache-2.0
"""Prefill in plain PyTorch."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention._docs import PLAN, RUN
from precast._ops.attention.prefill.masks import pairs_of_requests
from precast._ops.attention.reference import (
    paged_requests,
    ragged_requests,
    reference_outputs,
    row_bounds,
)
from precast._ops.paged._cache import Cache, entries_of, halves


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:class:`BatchPrefillWithPagedKVCacheWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q : torch.Tensor
        ``[qo_indptr[-1], heads, head_dim_qk]``, any device.
    qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor
        The batch, as for ``plan``.
    q_scale, k_scale, v_scale : float
        As for ``run``.
    sinks : torch.Tensor, optional
        As for ``run``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The output and the base-2 log-sum-exp, float32. Rows of no request are
        zeros.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.zeros(2, 2, 4), torch.arange(2.0).view(2, 1, 1, 1, 1).expand(2, 2, 1, 1, 4)
    >>> batch = torch.tensor([0, 2]), torch.tensor([0, 2]), torch.tensor([1, 0]), torch.tensor([1])
    >>> wrapped = batch_prefill_with_paged_kv_cache_reference(q, cache, *batch, causal=True)
    >>> wrapped[0][:, 0, 0]
    tensor([1.0000, 0.5000])
    """
    k, v = (entries_of(part, kv_layout == "HND") for part in halves(paged_kv_cache))
    table = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
    sizes = pairs_of_requests(qo_indptr, paged_kv_indptr, paged_kv_last_page_len, k.shape[1])
    requests = paged_requests(k, v, row_bounds(qo_indptr, 0, 0), *table)
    return reference_outputs(
        q,
        requests,
        v.shape[-1],
        return_lse,
        o_dtype,
        (q_scale, k_scale, v_scale),
        None if custom_mask is None else (custom_mask, sizes),
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        sinks=sinks,
        prefix_len=prefix_len_ptr,
        token_pos=token_pos_in_items_ptr,
        token_pos_len=token_pos_in_items_len,
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
    q_scale, k_scale, v_scale : float
        As for ``run``.
    sinks : torch.Tensor, optional
        The wrapper's ``_sinks``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The output and the base-2 log-sum-exp, float32. Rows of no request are
        zeros.

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
    requests = ragged_requests(k, v, row_bounds(qo_indptr, 0, 0), kv_indptr)
    return reference_outputs(
        q,
        requests,
        v.shape[-1],
        return_lse,
        o_dtype,
        (q_scale, k_scale, v_scale),
        None if custom_mask is None else (custom_mask, sizes),
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        sinks=sinks,
        prefix_len=prefix_len_ptr,
        token_pos=token_pos_in_items_ptr,
        token_pos_len=token_pos_in_items_len,
    )


# Not by a decorator, which would be a part of the source in a trace.
for _reference in (
    batch_prefill_with_paged_kv_cache_reference,
    batch_prefill_with_ragged_kv_cache_reference,
):
    documented(PLAN, RUN)(_reference)
