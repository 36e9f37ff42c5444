# SPDX-License-Identifier: Apache-2.0
"""Read the layouts of a paged KV cache, and compute what its references share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from precast._base.errors import CacheLayoutError
from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.declaration import Kind

#: Keys and values: one tensor with both in dimension 1, or a tensor each.
Cache: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"

#: Whether heads come before the entries of a page.
IS_HND = {"NHD": False, "HND": True}


def is_hnd(kv_layout: str) -> bool:
    """Return whether heads come before the entries of a page."""
    hnd = IS_HND.get(kv_layout)
    if hnd is None:
        raise TypeError("no layout")  # check_call() raises the error that explains it.
    return hnd


def check_layout(export: str, kv_layout: object) -> None:
    """Raise CacheLayoutError unless ``kv_layout`` is legal."""
    if not isinstance(kv_layout, str) or kv_layout not in IS_HND:
        raise CacheLayoutError(
            f"{export}: kv_layout must be {' or '.join(IS_HND)}, got {kv_layout!r}"
        )


def split(paged_kv_cache: Cache) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the arguments of an export: two tensors, or the one that holds both and None."""
    if not isinstance(paged_kv_cache, tuple):
        return paged_kv_cache, None
    if len(paged_kv_cache) != 2:
        raise TypeError("not a pair")  # check_call() raises the error that explains it.
    return paged_kv_cache


def keys_of(paged_kv_cache: Cache) -> torch.Tensor:
    """Return the tensor of keys, or the one that holds both."""
    return split(paged_kv_cache)[0]


def values_of(paged_kv_cache: Cache) -> torch.Tensor | None:
    """Return the tensor of values, or None if one tensor holds both."""
    return paged_kv_cache[1] if isinstance(paged_kv_cache, tuple) else None


def joined(k_cache: torch.Tensor, v_cache: torch.Tensor | None) -> Cache:
    """Return the public argument that :func:`split` took apart."""
    return k_cache if v_cache is None else (k_cache, v_cache)


def layout_of(hnd: bool) -> str:
    """Return the public argument of :func:`is_hnd`."""
    return "HND" if hnd else "NHD"


#: How a layout reaches an export.
LAYOUT_KIND = {"kv_layout": Kind("bool hnd", "_is_hnd({name})", layout_of, {"_is_hnd": is_hnd})}

#: Public arguments of an export with ``k_cache``, ``v_cache`` and ``hnd``.
DERIVED: dict[str, Callable[..., Any]] = {"paged_kv_cache": joined, "kv_layout": layout_of}


def check_call(export: str, paged_kv_cache: object, kv_layout: object) -> None:
    """Raise the error that names a layout or a cache of a wrong type."""
    check_layout(export, kv_layout)
    check_cache(export, "paged_kv_cache", paged_kv_cache)


def check_cache(export: str, name: str, cache: object) -> None:
    """Raise the error of a cache that is neither a tensor nor a pair."""
    got, legal = type(cache).__name__, isinstance(cache, torch.Tensor)
    if isinstance(cache, tuple):
        got = f"a tuple of {', '.join(type(part).__name__ for part in cache) or 'none'}"
        legal = [isinstance(part, torch.Tensor) for part in cache] == [True, True]
    if not legal:
        raise CacheLayoutError(
            f"{export}: {name} must be a torch.Tensor or a tuple of two, got {got}"
        ) from None


# -- references -----------------------------------------------------------------------------------


def halves(paged_kv_cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as views."""
    if isinstance(paged_kv_cache, tuple):
        return paged_kv_cache
    return paged_kv_cache[:, 0], paged_kv_cache[:, 1]


def copied(paged_kv_cache: Cache) -> Cache:
    """Return the same values in memory of their own."""
    if isinstance(paged_kv_cache, tuple):
        return paged_kv_cache[0].clone(), paged_kv_cache[1].clone()
    return paged_kv_cache.clone()


def entries_of(cache: torch.Tensor, hnd: bool) -> torch.Tensor:
    """View a cache with heads as ``[pages, page_size, heads, head_dim]``."""
    if cache.dim() == 3:
        return cache.unsqueeze(1)
    return cache.transpose(1, 2) if hnd else cache


def table_slots(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    pages: int,
    page_size: int,
) -> torch.Tensor:
    """Return the slots that a page table gives tokens; -1 for a token without a place."""
    batch = kv_indptr.numel() - 1
    request, position = batch_indices.long(), positions.long()
    kept = (request >= 0) & (request < batch) & (position >= 0) & (position < 2**31)
    request, position = request.where(kept, 0), position.where(kept, 0)
    begin, end = kv_indptr.long()[request], kv_indptr.long()[(request + 1).clamp(max=batch)]
    at = begin + position // max(page_size, 1)
    kept = kept & (begin >= 0) & (at < end) & (at < kv_indices.numel())
    table = torch.nn.functional.pad(kv_indices.long(), (0, 1), value=-1)
    page = table[at.where(kept, kv_indices.numel())]
    slots = page * page_size + position % max(page_size, 1)
    return slots.where(kept & (page >= 0) & (page < pages), -1)


def put(entries: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows to their slots in ``[pages, page_size, ...]``, bit for bit."""
    pages, page_size = entries.shape[:2]
    slots = slots.long()
    kept = (slots >= 0) & (slots < pages * page_size)
    page, entry = slots[kept] // max(page_size, 1), slots[kept] % max(page_size, 1)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[rows.element_size()]
    entries.view(bits)[page, entry] = rows.view(bits)[: kept.numel()][kept]


def quantized(rows: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``rows / scale`` in float32, rounded to nearest even and saturated."""
    scale = torch.as_tensor(scale, dtype=torch.float32, device=rows.device).reshape(())
    return saturated(rows.float() / scale, dtype)
