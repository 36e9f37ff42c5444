# SPDX-License-Identifier: Apache-2.0
"""Decode in plain PyTorch."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention._docs import PLAN, RUN
from precast._ops.attention.reference import paged_requests, reference_outputs, row_bounds
from precast._ops.paged._cache import Cache, entries_of, halves


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:class:`BatchDecodeWithPagedKVCacheWrapper` in plain PyTorch: one plan and one run.

    Parameters
    ----------
    q : torch.Tensor
        ``[batch_size * q_len_per_req, heads, head_dim]``, any device.
    indptr, indices, last_page_len : torch.Tensor
        The page table, as for ``plan``.
    q_scale, k_scale, v_scale : float
        As for ``run``.
    sinks : torch.Tensor, optional
        As for ``run``.
    q_len_per_req : int
        As for ``plan``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The output and the base-2 log-sum-exp, float32.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.ones(1, 2, 4), torch.full((1, 2, 1, 1, 4), 3.0)
    >>> table = torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1])
    >>> batch_decode_with_paged_kv_cache_reference(q, cache, *table)[0].unique()
    tensor([3.])
    """
    k, v = (entries_of(part, kv_layout == "HND") for part in halves(paged_kv_cache))
    bounds = row_bounds(None, q_len_per_req, indptr.numel() - 1)
    requests = paged_requests(k, v, bounds, indptr, indices, last_page_len)
    return reference_outputs(
        q,
        requests,
        v.shape[-1],
        return_lse,
        o_dtype,
        (q_scale, k_scale, v_scale),
        causal=q_len_per_req > 1,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        sinks=sinks,
    )


# Not by a decorator, which would be a part of the source in a trace.
documented(PLAN, RUN)(batch_decode_with_paged_kv_cache_reference)
