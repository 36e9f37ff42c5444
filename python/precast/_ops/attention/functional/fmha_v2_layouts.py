# SPDX-License-Identifier: Apache-2.0
"""The five layouts of queries, keys and values, and the exports that each is passed to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from precast._base.errors import CacheLayoutError
from precast._base.torch import torch
from precast._op.export import Export
from precast._ops.attention.functional.calls import Words
from precast._ops.attention.functional.exports import DERIVED, paged_export, ragged_export

#: One tensor, or a tuple of two or three, of which the second may be a tuple, too.
Tensors: TypeAlias = "torch.Tensor | tuple[Any, ...]"

PACKED, CONTIGUOUS, SEPARATE = "PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V"
PAGED = {"Q_PAGED_KV_NHD": "NHD", "Q_PAGED_KV_HND": "HND"}
LAYOUTS = (PACKED, CONTIGUOUS, *PAGED, SEPARATE)

WORDS = Words(
    "trtllm_fmha_v2_prefill",
    cache="the cache of qkv",
    keys="the keys of qkv",
    values="the values of qkv",
    q_bounds="cum_seq_lens_q",
    q_len="max_q_len",
    rows="the queries of qkv",
    has_pdl=False,
)


class Parts(NamedTuple):
    """Queries, keys and values, ragged or in pages."""

    query: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def parts_of(qkv: Tensors, input_layout: str) -> Parts:
    """Return views of the parts of ``qkv``; CacheLayoutError if it is not of the layout."""
    if input_layout == PACKED:
        if isinstance(qkv, torch.Tensor) and qkv.dim() == 4 and qkv.shape[1] == 3:
            return Parts(*qkv.unbind(1))
        wanted = "a tensor [tokens, 3, num_heads, head_dim]"
    elif input_layout == CONTIGUOUS:
        if _are_tensors(qkv, 2) and qkv[1].dim() == 4 and qkv[1].shape[1] == 2:
            return Parts(qkv[0], *qkv[1].unbind(1))
        wanted = "a tuple of queries and of keys and values [tokens, 2, num_kv_heads, head_dim]"
    elif input_layout == SEPARATE:
        if _are_tensors(qkv, 3):
            return Parts(*qkv)
        wanted = "a tuple of queries, keys and values"
    elif isinstance(input_layout, str) and input_layout in PAGED:
        if isinstance(qkv, tuple) and len(qkv) == 2 and isinstance(qkv[0], torch.Tensor):
            cache = qkv[1]
            if isinstance(cache, torch.Tensor) and cache.dim() == 5 and cache.shape[1] == 2:
                return Parts(qkv[0], *cache.unbind(1))
            if _are_tensors(cache, 2):
                return Parts(qkv[0], *cache)
        wanted = "a tuple of queries and of a cache [pages, 2, ...] or a tuple of keys and values"
    else:
        raise CacheLayoutError(
            f"{WORDS.function}: input_layout must be {', '.join(LAYOUTS)}, got {input_layout!r:.40}"
        )
    raise CacheLayoutError(
        f"{WORDS.function}: qkv must be {wanted} in layout {input_layout}, got {_described(qkv)}"
    )


def _are_tensors(parts: Any, count: int) -> bool:
    is_tuple = isinstance(parts, tuple) and len(parts) == count
    return is_tuple and all(isinstance(part, torch.Tensor) for part in parts)


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {[*value.shape]}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    return type(value).__name__


def table_of(block_tables: torch.Tensor | None, qkv: Tensors) -> torch.Tensor:
    """Return the pages of keys, which are those of values.

    Values that are a tensor of their own may have pages in a table of two rows: those of keys,
    moved by the distance of both in memory, which the address of the values' tensor says, too.
    """
    if block_tables is None:
        raise ValueError(f"{WORDS.function}: block_tables must be a tensor for pages, got None")
    if block_tables.dim() == 3 and block_tables.shape[1] == 2 and isinstance(qkv[1], tuple):
        return block_tables[:, 0]
    return block_tables


# -- exports --------------------------------------------------------------------------------------


def _joined(first: torch.Tensor, second: torch.Tensor, count: int) -> torch.Tensor:
    """Return the tensor of which two are parts 0 and 1 of ``count`` in dimension 1."""
    step = second.storage_offset() - first.storage_offset()
    shape = (first.shape[0], count, *first.shape[1:])
    try:
        return first.as_strided(shape, (first.stride(0), step, *first.stride()[1:]))
    except RuntimeError:  # They are not.
        return first


_SCORES: dict[str, Callable[..., Any]] = {
    "bmm1_scale": DERIVED["bmm1_scale"],
    "bmm2_scale": DERIVED["bmm2_scale"],
    "mask_mode": lambda causal: "causal" if causal else "padding",
    "pos_encoding_mode": lambda is_alibi: "alibi" if is_alibi else None,
    "logits_soft_cap_scale": lambda logits_soft_cap: logits_soft_cap or None,
    "save_softmax_stats": lambda lse: lse is not None,
}


def _ragged(layout: str, qkv: Callable[..., Any], suffix: str) -> Export:
    derived = {**_SCORES, "qkv": qkv, "input_layout": lambda query: layout}
    return ragged_export(WORDS, derived, f"{WORDS.function}_{suffix}")


_PAGED = paged_export(
    WORDS,
    {
        **_SCORES,
        "qkv": lambda query, k_cache, v_cache: (query, _joined(k_cache, v_cache, 2)),
        "input_layout": lambda kv_layout: f"Q_PAGED_KV_{kv_layout}",
        "batch_size": lambda seq_lens, mask: seq_lens.shape[0],
    },
)
#: The export of each layout.
EXPORTS = {
    PACKED: _ragged(PACKED, lambda query, k, v: _joined(query, k, 3), "packed"),
    CONTIGUOUS: _ragged(CONTIGUOUS, lambda query, k, v: (query, _joined(k, v, 2)), "contiguous"),
    SEPARATE: _ragged(SEPARATE, lambda query, k, v: (query, k, v), "separate"),
    **dict.fromkeys(PAGED, _PAGED),
}
