# SPDX-License-Identifier: Apache-2.0
"""Attention over block tables and ragged tensors in plain PyTorch, one request after the other."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._ops.attention.functional.calls import PagedCall, RaggedCall
from precast._ops.attention.reference import (
    attend,
    features_of,
    ragged_requests,
    table_requests,
)
from precast._ops.paged._cache import Cache, entries_of


def caches_of(kv_cache: Cache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[pages, page_size, kv_heads, head_dim]``.

    One tensor holds both in dimension 1, which may have one element where they are the same.
    """
    parts = kv_cache
    if not isinstance(parts, tuple):
        parts = parts[:, 0], parts[:, -1]
    keys, values = (entries_of(part, kv_layout == "HND") for part in parts)
    return keys, values


def table_attention(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    q_bounds: torch.Tensor | None,
    q_len: int,
    **features: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs, base-2 log-sum-exps, both float32, and which rows a request has.

    ``features`` are those of :func:`features_of`. A draft mask counts where there are drafts, and
    takes the place of ``causal``.
    """
    bounds = [i * q_len for i in range(seq_lens.shape[0] + 1)]
    if q_bounds is not None:
        bounds = q_bounds.tolist()
    requests = table_requests(*caches, bounds, block_tables, seq_lens)
    return attend(query, requests, caches[1].shape[-1], features_of(query, **features))


def row_attention(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bounds: torch.Tensor,
    kv_bounds: torch.Tensor,
    **features: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same as :func:`table_attention`, of ragged keys and values."""
    requests = ragged_requests(k, v, q_bounds.tolist(), kv_bounds)
    return attend(query, requests, v.shape[2], features_of(query, **features))


def write_paged(c: PagedCall) -> None:
    """Write what the export over a block table writes; rows of no request stay as they are."""
    kv_cache: Cache = c.k_cache if c.v_cache is None else (c.k_cache, c.v_cache)
    results = table_attention(
        c.query,
        caches_of(kv_cache, "HND" if c.is_hnd else "NHD"),
        c.tables,
        c.lens,
        c.q_bounds,
        c.q_len,
        draft_mask=c.mask,
        **_features(c),
    )
    _write(c, *results)


def write_ragged(c: RaggedCall) -> None:
    """Write what the export over ragged keys and values writes."""
    _write(c, *row_attention(c.query, c.k, c.v, c.q_bounds, c.kv_bounds, **_features(c)))


def _features(c: PagedCall | RaggedCall) -> dict[str, Any]:
    return {
        "causal": c.causal,
        "window_left": c.window_left,
        "logits_soft_cap": c.logits_soft_cap,
        "pos_encoding_mode": "ALIBI" if c.is_alibi else "NONE",
        "sm_scale": c.sm_scale,
        "out_scale": c.out_scale,
        "qk_scale": c.qk_scale,
        "v_scale": c.v_scale,
        "sinks": c.sinks,
    }


def _write(
    c: PagedCall | RaggedCall, out: torch.Tensor, lse: torch.Tensor, used: torch.Tensor
) -> None:
    c.out[used] = out[used].to(c.out.dtype)
    if c.lse is not None:
        c.lse[used] = lse[used]
