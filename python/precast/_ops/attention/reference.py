# SPDX-License-Identifier: Apache-2.0
"""Attention of a batch in plain PyTorch: one request after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from precast._base.torch import torch
from precast._ops.attention.buffers import get_alibi_slopes
from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.formula import attention, unpacked_mask
from precast._ops.attention.plan import Scores
from precast._ops.attention.validation import softmax_scale

#: A request of a batch: its number, its rows of queries, its keys and values in their order.
Request: TypeAlias = "tuple[int, slice, torch.Tensor, torch.Tensor]"


@dataclass(frozen=True)
class Features:
    """What changes the scores and outputs of a batch."""

    mask_mode: int = MaskMode.NON_CAUSAL
    packed_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    window_left: int = -1
    pos_encoding: int = PosEncodingMode.NONE
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


def features_of(q: torch.Tensor, scores: Scores, sm_factor: float = 1.0, **more: Any) -> Features:
    """The features of these options of scores; ``more`` are features by name."""
    alibi = scores.pos_encoding_mode == PosEncodingMode.ALIBI.name
    options: dict[str, Any] = {
        "mask_mode": MaskMode.CAUSAL if scores.causal else MaskMode.NON_CAUSAL,
        "window_left": scores.window_left,
        "pos_encoding": PosEncodingMode[scores.pos_encoding_mode],
        "alibi_slopes": get_alibi_slopes(q.shape[1], q.device) if alibi else None,
        "rope_scale": scores.rope_scale or 1.0,
        "rope_theta": scores.rope_theta or 1e4,
        "logits_soft_cap": scores.logits_soft_cap or 0.0,
        "sm_scale": softmax_scale(scores.sm_scale, q.shape[-1]) * sm_factor,
    }
    return Features(**{**options, **more})


def attend(
    q: torch.Tensor,
    requests: Iterator[Request],
    head_dim_vo: int,
    f: Features,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, base-2 log-sum-exps, and which rows a request has; all others are zeros."""
    dtype = dtype or torch.float32
    out = q.new_zeros((*q.shape[:2], head_dim_vo), dtype=dtype)
    lse = q.new_zeros(q.shape[:2], dtype=dtype)
    used = torch.zeros(q.shape[0], dtype=torch.bool, device=q.device)
    scales = f.qk_scale, f.v_scale
    qk_scale, v_scale = (1.0 if s is None else s.to(dtype).reshape(()) for s in scales)
    rope = f.pos_encoding == PosEncodingMode.ROPE_LLAMA
    for number, rows, k, v in requests:
        n, m = rows.stop - rows.start, k.shape[0]
        if n <= 0:
            continue
        out[rows], lse[rows] = attention(
            q[rows],
            k,
            v,
            f.sm_scale * qk_scale,
            causal=f.mask_mode == MaskMode.CAUSAL,
            mask=_mask_of(number, n, m, f),
            window_left=f.window_left,
            logits_soft_cap=f.logits_soft_cap,
            alibi_slopes=f.alibi_slopes if f.pos_encoding == PosEncodingMode.ALIBI else None,
            rope=(f.rope_scale, f.rope_theta) if rope else None,
            sinks=f.sinks,
            items=_items_of(number, f),
            dtype=dtype,
        )
        used[rows] = True
    return out * (f.out_scale * v_scale), lse, used


def _mask_of(request: int, n: int, m: int, f: Features) -> torch.Tensor | None:
    if f.mask_mode != MaskMode.CUSTOM:
        return None
    assert f.packed_mask is not None
    assert f.mask_indptr is not None
    begin = int(f.mask_indptr[request])
    return unpacked_mask(f.packed_mask[begin : begin + (n * m + 7) // 8], n, m)


def _items_of(request: int, f: Features) -> tuple[int, torch.Tensor] | None:
    if f.mask_mode != MaskMode.MULTIITEMSCORING:
        return None
    assert f.prefix_len is not None
    assert f.token_pos is not None
    size = f.token_pos_len or f.token_pos.numel()
    # There is little that PyTorch can do with unsigned words of 16 bits.
    places = f.token_pos.view(torch.int16).long()[request * size : (request + 1) * size]
    return int(f.prefix_len[request]), places & 0xFFFF


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
    kv_last_page_len: torch.Tensor,
) -> Iterator[Request]:
    """The requests of caches ``[pages, page_size, kv_heads, head_dim]``, any strides."""
    page_size, starts, last = k_cache.shape[1], kv_indptr.tolist(), kv_last_page_len.tolist()
    for i in range(len(bounds) - 1):
        pages = kv_indices[starts[i] : starts[i + 1]].long()
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
