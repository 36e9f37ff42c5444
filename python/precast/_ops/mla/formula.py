# SPDX-License-Identifier: Apache-2.0
"""Compute multi-head latent attention of a batch in plain PyTorch, in float32.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1: attention over compressed keys and values, with
the up-projections absorbed into queries and outputs.
"""

from __future__ import annotations

import math

from precast._base.torch import torch
from precast._ops.attention.formula import attention
from precast._ops.attention.reference import gathered


def attend_pages(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor | None,
    bounds: list[int],
    kv_indptr: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_len: torch.Tensor,
    sm_scale: float | torch.Tensor,
    causal: bool,
    kpe_factor: float | torch.Tensor = 1.0,
    ckv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    lse_base_e: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs and log-sum-exps in float32, and which rows a request has; others are zeros.

    ``bounds`` are those of each request's queries. Without ``kv_indptr``, ``kv_indices`` have a row
    of pages for each request. ``kpe_factor`` multiplies kpe, ``ckv_scales [pages, page_size,
    groups]`` groups of columns of each token's ckv.
    """
    out = q_nope.new_zeros(q_nope.shape, dtype=torch.float32)
    lse = q_nope.new_zeros(q_nope.shape[:2], dtype=torch.float32)
    used = torch.zeros(q_nope.shape[0], dtype=torch.bool, device=q_nope.device)
    page_size = ckv_cache.shape[1]
    for request in range(len(bounds) - 1):
        rows = slice(bounds[request], bounds[request + 1])
        if rows.stop <= rows.start:
            continue
        pages = pages_of(request, kv_indptr, kv_indices)
        count = max(0, min(int(kv_len[request]), pages.numel() * page_size))
        pages = pages[: -(-count // page_size)].long()
        values = gathered(ckv_cache, pages, count).float()
        if ckv_scales is not None:
            scales = gathered(ckv_scales, pages, count)
            groups = values.unflatten(-1, (scales.shape[-1], -1))
            values = (groups * scales.unsqueeze(-1)).flatten(-2)
        queries, keys = q_nope[rows].float(), values
        if q_pe is not None and kpe_cache is not None:
            queries = torch.cat([queries, q_pe[rows].float()], -1)
            keys = torch.cat([keys, gathered(kpe_cache, pages, count).float() * kpe_factor], -1)
        out[rows], lse[rows] = attention(
            queries, keys.unsqueeze(1), values.unsqueeze(1), sm_scale, causal=causal, sinks=sinks
        )
        used[rows] = True
    return out, lse * math.log(2.0) if lse_base_e else lse, used


def pages_of(
    request: int, kv_indptr: torch.Tensor | None, kv_indices: torch.Tensor
) -> torch.Tensor:
    """Return the pages of a request in a list of pages, or in a table without ``kv_indptr``."""
    if kv_indptr is None:
        return kv_indices[request]
    begin, end = kv_indptr[request : request + 2].tolist()
    return kv_indices[begin:end]
