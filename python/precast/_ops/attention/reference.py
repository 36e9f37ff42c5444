# SPDX-License-Identifier: Apache-2.0
"""Compute attention of a batch in plain PyTorch, one request after the other."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

from precast._base.torch import torch
from precast._ops.attention.buffers import get_alibi_slopes
from precast._ops.attention.formula import attention, drafts_seen, unpacked_mask
from precast._ops.attention.validation import softmax_scale
from precast._ops.quantize.packbits import segment_packbits_reference

#: A request of a batch: its number, its rows of queries, its keys and values in their order.
Request: TypeAlias = "tuple[int, slice, torch.Tensor, torch.Tensor]"


def features_of(
    q: torch.Tensor,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    pos_encoding_mode: str = "NONE",
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    sm_factor: float = 1.0,
    **more: Any,
) -> SimpleNamespace:
    """Collect what changes the scores and outputs; ``more`` are other features by name."""
    alibi, rope = pos_encoding_mode == "ALIBI", pos_encoding_mode == "ROPE_LLAMA"
    scores = {
        "causal": causal,
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap or 0.0,
        "alibi_slopes": get_alibi_slopes(q.shape[1], q.device) if alibi else None,
        "rope": (rope_scale or 1.0, rope_theta or 1e4) if rope else None,
        "sinks": more.pop("sinks", None),
    }
    scale = softmax_scale(sm_scale, q.shape[-1]) * sm_factor
    masks = {"packed_mask": None, "prefix_len_ptr": None, "draft_mask": None}
    scales = {"out_scale": 1.0, "qk_scale": None, "v_scale": None}
    return SimpleNamespace(scores=scores, sm_scale=scale, **{**masks, **scales, **more})


def reference_outputs(
    q: torch.Tensor,
    requests: Iterator[Request],
    head_dim_vo: int,
    mask_sizes: torch.Tensor | None = None,
    *,
    return_lse: bool,
    o_dtype: torch.dtype | None,
    custom_mask: torch.Tensor | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **features: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute what a reference returns; ``mask_sizes`` are the elements of each request's mask."""
    if custom_mask is not None:
        sizes = torch.as_tensor(mask_sizes)
        bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(custom_mask.device)
        packed = segment_packbits_reference(custom_mask.flatten(), bounds, "little")
        features["packed_mask"], features["mask_indptr"] = packed
    scales = (1.0 if scale is None else scale for scale in (q_scale, k_scale, v_scale))
    q_scale, k_scale, v_scale = scales
    options = features_of(q, **features, sm_factor=q_scale * k_scale, out_scale=v_scale)
    out, lse, _ = attend(q, requests, head_dim_vo, options)
    out = out.to(o_dtype or q.dtype)
    return (out, lse) if return_lse else out


def attend(
    q: torch.Tensor, requests: Iterator[Request], head_dim_vo: int, f: SimpleNamespace
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs, base-2 log-sum-exps, and which rows a request has; others are zeros."""
    out = q.new_zeros((*q.shape[:2], head_dim_vo), dtype=torch.float32)
    lse = q.new_zeros(q.shape[:2], dtype=torch.float32)
    used = torch.zeros(q.shape[0], dtype=torch.bool, device=q.device)
    # One number, or one for each head, of scores [heads, queries, tokens] and of outputs.
    shapes = {"qk_scale": (-1, 1, 1), "v_scale": (-1, 1)}
    scales = {name: getattr(f, name) for name in shapes}
    qk_scale, v_scale = (
        1.0 if scale is None else scale.float().reshape(shapes[name])
        for name, scale in scales.items()
    )
    for number, rows, k, v in requests:
        n, m = rows.stop - rows.start, k.shape[0]
        if n <= 0:
            continue
        out[rows], lse[rows] = attention(
            q[rows],
            k,
            v,
            f.sm_scale * qk_scale,
            mask=_mask_of(number, rows, m, f),
            items=_items_of(number, f),
            **f.scores,
        )
        used[rows] = True
    return out * (f.out_scale * v_scale), lse, used


def _mask_of(request: int, rows: slice, m: int, f: SimpleNamespace) -> torch.Tensor | None:
    n = rows.stop - rows.start
    if f.draft_mask is not None:
        return drafts_seen(f.draft_mask.flatten(0, -2)[rows], m)
    if f.packed_mask is None:
        return None
    begin = int(f.mask_indptr[request])
    return unpacked_mask(f.packed_mask[begin : begin + (n * m + 7) // 8], n, m)


def _items_of(request: int, f: SimpleNamespace) -> tuple[int, torch.Tensor] | None:
    if f.prefix_len_ptr is None:
        return None
    size = f.token_pos_in_items_len
    # PyTorch has few functions for uint16.
    places = f.token_pos_in_items_ptr.view(torch.int16)
    if size:  # Otherwise one row is for all requests.
        places = places[request * size : (request + 1) * size]
    return int(f.prefix_len_ptr[request]), places.long() & 0xFFFF


def paged_requests(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    bounds: list[int],
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None = None,
) -> Iterator[Request]:
    """Yield the requests of caches ``[pages, page_size, kv_heads, head_dim]``, any strides.

    Their lengths are ``kv_len``, or follow from the last pages.
    """
    page_size, starts = k_cache.shape[1], kv_indptr.tolist()
    for i in range(len(bounds) - 1):
        pages = kv_indices[starts[i] : starts[i + 1]].long()
        capacity = pages.numel() * page_size
        if kv_len is not None:
            m = max(0, min(int(kv_len[i]), capacity))
        else:
            assert kv_last_page_len is not None
            m = capacity - page_size + int(kv_last_page_len[i]) if capacity else 0
        rows = slice(bounds[i], bounds[i + 1])
        k, v = (gathered(cache, pages, m) for cache in (k_cache, v_cache))
        yield i, rows, k, v


def table_requests(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    bounds: list[int],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Iterator[Request]:
    """Yield the requests of a block table over caches ``[pages, page_size, kv_heads, head_dim]``.

    A length that is longer than a row of the table ends with the row.
    """
    page_size, width = k_cache.shape[1], block_tables.shape[1]
    for i in range(len(bounds) - 1):
        m = min(max(int(seq_lens[i]), 0), width * page_size)
        pages = block_tables[i, : -(-m // page_size)].long()
        k, v = (gathered(cache, pages, m) for cache in (k_cache, v_cache))
        yield i, slice(bounds[i], bounds[i + 1]), k, v


def gathered(cache: torch.Tensor, pages: torch.Tensor, m: int) -> torch.Tensor:
    """Gather the first ``m`` tokens of pages; not every PyTorch indexes floats of 8 bits."""
    is_8_bit = cache.element_size() == 1
    raw = cache.view(torch.uint8) if is_8_bit else cache
    taken = raw[pages].flatten(0, 1)[:m]
    return taken.view(cache.dtype) if is_8_bit else taken


def ragged_requests(
    k: torch.Tensor, v: torch.Tensor, bounds: list[int], kv_indptr: torch.Tensor
) -> Iterator[Request]:
    """Yield the requests of keys and values one behind the other."""
    starts = kv_indptr.tolist()
    for i in range(len(bounds) - 1):
        tokens = slice(starts[i], starts[i + 1])
        yield i, slice(bounds[i], bounds[i + 1]), k[tokens], v[tokens]
