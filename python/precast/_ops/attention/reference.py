# SPDX-License-Identifier: Apache-2.0
"""Attention of a batch in plain PyTorch: one request after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from precast._base.torch import torch
from precast._ops.attention.formula import attention, unpacked_mask

#: A request of a batch: its number, its rows of queries, its keys and values in their order.
Request: TypeAlias = "tuple[int, slice, torch.Tensor, torch.Tensor]"

#: Values of ``mask_mode`` and of ``pos_encoding``, as the kernels know them.
NON_CAUSAL, CAUSAL, CUSTOM, MULTI_ITEM = 0, 1, 2, 3
NO_POSITIONS, ROPE_LLAMA, ALIBI = 0, 1, 2


#: What changes the scores of a batch, where it is not said: arguments of the exports.
DEFAULTS = {
    "mask_mode": 0,
    "packed_mask": None,
    "mask_indptr": None,
    "window_left": -1,
    "pos_encoding": 0,
    "alibi_slopes": None,
    "rope_scale": 1.0,
    "rope_theta": 1e4,
    "logits_soft_cap": 0.0,
    "sm_scale": 1.0,
    "out_scale": 1.0,
    "qk_scale": None,
    "v_scale": None,
    "sinks": None,
    "prefix_len": None,
    "token_pos": None,
    "token_pos_len": 0,
}


def attend(
    q: torch.Tensor,
    requests: Iterator[Request],
    head_dim_vo: int,
    features: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, base-2 log-sum-exps, and which rows a request has; all others are zeros."""
    dtype = dtype or torch.float32
    f = {**DEFAULTS, **features}
    out = q.new_zeros((*q.shape[:2], head_dim_vo), dtype=dtype)
    lse = q.new_zeros(q.shape[:2], dtype=dtype)
    used = torch.zeros(q.shape[0], dtype=torch.bool, device=q.device)
    scales = f["qk_scale"], f["v_scale"]
    qk_scale, v_scale = (1.0 if s is None else s.to(dtype).reshape(()) for s in scales)
    for number, rows, k, v in requests:
        n, m = rows.stop - rows.start, k.shape[0]
        if n <= 0:
            continue
        out[rows], lse[rows] = attention(
            q[rows],
            k,
            v,
            f["sm_scale"] * qk_scale,
            causal=f["mask_mode"] == CAUSAL,
            mask=_mask_of(number, n, m, f),
            window_left=f["window_left"],
            logits_soft_cap=f["logits_soft_cap"],
            alibi_slopes=f["alibi_slopes"] if f["pos_encoding"] == ALIBI else None,
            rope=(f["rope_scale"], f["rope_theta"]) if f["pos_encoding"] == ROPE_LLAMA else None,
            sinks=f["sinks"],
            items=_items_of(number, f),
            dtype=dtype,
        )
        used[rows] = True
    return out * (f["out_scale"] * v_scale), lse, used


def _mask_of(request: int, n: int, m: int, f: Mapping[str, Any]) -> torch.Tensor | None:
    if f["mask_mode"] != CUSTOM:
        return None
    begin = int(f["mask_indptr"][request])
    return unpacked_mask(f["packed_mask"][begin : begin + (n * m + 7) // 8], n, m)


def _items_of(request: int, f: Mapping[str, Any]) -> tuple[int, torch.Tensor] | None:
    if f["mask_mode"] != MULTI_ITEM:
        return None
    size = f["token_pos_len"] or f["token_pos"].numel()
    # There is little that PyTorch can do with unsigned words of 16 bits.
    places = f["token_pos"].view(torch.int16).long()[request * size : (request + 1) * size]
    return int(f["prefix_len"][request]), places & 0xFFFF


def tokens_of_pages(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """``[batch]``: how many tokens each request has."""
    if kv_indptr.shape[0] != kv_last_page_len.shape[0] + 1:
        raise ValueError(
            f"indptr of pages must have one element more than last_page_len, got "
            f"{kv_indptr.shape[0]} and {kv_last_page_len.shape[0]}"
        )
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


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
        yield i, rows, k, v


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
        yield i, slice(bounds[i], bounds[i + 1]), k[tokens], v[tokens]
