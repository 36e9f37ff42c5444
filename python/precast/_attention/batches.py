# SPDX-License-Identifier: Apache-2.0
"""Attention of a batch in plain PyTorch: one request after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from precast._attention.formula import attention, unpacked_mask
from precast._torch import torch

#: Values of ``mask_mode`` and of ``pos_encoding``, as the kernels know them.
NON_CAUSAL, CAUSAL, CUSTOM, MULTI_ITEM = 0, 1, 2, 3
NO_POSITIONS, ROPE_LLAMA, ALIBI = 0, 1, 2


class Features(NamedTuple):
    """What changes the scores of a batch; the arguments of the exports with these names."""

    mask_mode: int = NON_CAUSAL
    packed_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    window_left: int = -1
    pos_encoding: int = NO_POSITIONS
    alibi_slopes: torch.Tensor | None = None
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    logits_soft_cap: float = 0.0
    sm_scale: float = 1.0
    out_scale: float = 1.0
    qk_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    prefix_len: torch.Tensor | None = None
    token_pos: torch.Tensor | None = None
    token_pos_len: int = 0


class Request(NamedTuple):
    """One request of a batch: its rows of queries, and its keys and values in their order."""

    number: int
    rows: slice
    k: torch.Tensor
    v: torch.Tensor


def attend(
    q: torch.Tensor,
    requests: Iterator[Request],
    features: Features,
    head_dim_vo: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, base-2 log-sum-exps, and which rows a request has; all others are zeros."""
    dtype = dtype or torch.float32
    out = q.new_zeros((*q.shape[:2], head_dim_vo), dtype=dtype)
    lse = q.new_zeros(q.shape[:2], dtype=dtype)
    used = torch.zeros(q.shape[0], dtype=torch.bool, device=q.device)
    scale, factor = features.sm_scale, features.out_scale
    scales = features.qk_scale, features.v_scale
    qk_scale, v_scale = (1.0 if s is None else s.to(dtype).reshape(()) for s in scales)
    for request in requests:
        rows, k = request.rows, request.k
        n, m = rows.stop - rows.start, k.shape[0]
        if n <= 0:
            continue
        out[rows], lse[rows] = attention(
            q[rows],
            k,
            request.v,
            scale * qk_scale,
            causal=features.mask_mode == CAUSAL,
            mask=_mask_of(request.number, n, m, features),
            window_left=features.window_left,
            logits_soft_cap=features.logits_soft_cap,
            alibi_slopes=features.alibi_slopes if features.pos_encoding == ALIBI else None,
            rope=(features.rope_scale, features.rope_theta)
            if features.pos_encoding == ROPE_LLAMA
            else None,
            sinks=features.sinks,
            items=_items_of(request.number, features),
            dtype=dtype,
        )
        used[rows] = True
    return out * (factor * v_scale), lse, used


def _mask_of(request: int, n: int, m: int, features: Features) -> torch.Tensor | None:
    if features.mask_mode != CUSTOM:
        return None
    assert features.packed_mask is not None
    assert features.mask_indptr is not None
    begin = int(features.mask_indptr[request])
    return unpacked_mask(features.packed_mask[begin : begin + (n * m + 7) // 8], n, m)


def _items_of(request: int, features: Features) -> tuple[int, torch.Tensor] | None:
    if features.mask_mode != MULTI_ITEM:
        return None
    assert features.prefix_len is not None
    assert features.token_pos is not None
    size = features.token_pos_len or features.token_pos.numel()
    # There is little that PyTorch can do with unsigned words of 16 bits.
    places = features.token_pos.view(torch.int16).long()[request * size : (request + 1) * size]
    return int(features.prefix_len[request]), places & 0xFFFF


def row_bounds(qo_indptr: torch.Tensor | None, q_len_per_req: int, batch: int) -> list[int]:
    """Where the rows of each request begin, and where the last one ends."""
    if qo_indptr is None:
        return [i * q_len_per_req for i in range(batch + 1)]
    return [int(bound) for bound in qo_indptr.tolist()]


def paged_requests(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    bounds: list[int],
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None = None,
) -> Iterator[Request]:
    """The requests of caches ``[pages, page_size, kv_heads, head_dim]``, any strides."""
    page_size, starts = k_cache.shape[1], kv_indptr.tolist()
    tokens = None if kv_len is None else kv_len.tolist()
    last = [] if kv_last_page_len is None else kv_last_page_len.tolist()
    for i in range(len(bounds) - 1):
        pages = kv_indices[starts[i] : starts[i + 1]].long()
        if tokens is not None:
            m = int(tokens[i])
        else:
            m = (pages.numel() - 1) * page_size + int(last[i]) if pages.numel() else 0
        rows = slice(bounds[i], bounds[i + 1])
        k, v = (_tokens(cache, pages, m) for cache in (k_cache, v_cache))
        yield Request(i, rows, k, v)


def _tokens(cache: torch.Tensor, pages: torch.Tensor, m: int) -> torch.Tensor:
    """``[m, kv_heads, head_dim]``; a narrow type has no indexing of its own everywhere."""
    narrow = cache.element_size() == 1
    raw = cache.view(torch.uint8) if narrow else cache
    taken = raw[pages].flatten(0, 1)[:m]
    return taken.view(cache.dtype) if narrow else taken


def ragged_requests(
    k: torch.Tensor, v: torch.Tensor, bounds: list[int], kv_indptr: torch.Tensor
) -> Iterator[Request]:
    """The requests of keys and values one behind the other."""
    starts = kv_indptr.tolist()
    for i in range(len(bounds) - 1):
        tokens = slice(starts[i], starts[i + 1])
        yield Request(i, slice(bounds[i], bounds[i + 1]), k[tokens], v[tokens])
