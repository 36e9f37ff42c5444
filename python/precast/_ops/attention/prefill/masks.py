# SPDX-License-Identifier: Apache-2.0
"""Pack the masks of a batch to bits as the kernels read them; each request starts a byte."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.attention.reference import tokens_of_pages
from precast._ops.quantize.packbits import segment_packbits


def kv_lengths(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor | None, page_size: int
) -> torch.Tensor:
    """Count the tokens of each request, ``[batch]``; without pages ``kv_indptr`` has them."""
    if kv_last_page_len is None:
        return kv_indptr.diff()
    return tokens_of_pages(kv_indptr, kv_last_page_len, page_size)


def pairs_of_requests(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    page_size: int,
    non_blocking: bool = False,
) -> torch.Tensor:
    """Count the pairs of a query and a key of each request, ``[batch]``, int64.

    Lengths on the host are copied to the GPU that others are on, and never the other way.
    """
    if qo_indptr.shape != kv_indptr.shape:
        raise ValueError(
            f"The length of qo_indptr and {'paged_' if page_size else ''}kv_indptr should be the "
            f"same, got {qo_indptr.shape[0]} and {kv_indptr.shape[0]}"
        )
    lengths = [t for t in (qo_indptr, kv_indptr, kv_last_page_len) if t is not None]
    device = next((t.device for t in lengths if t.is_cuda), qo_indptr.device)
    rows, tokens, *last = (t.to(device, non_blocking=non_blocking) for t in lengths)
    return rows.diff().long() * kv_lengths(tokens, last[0] if last else None, page_size)


def check_mask_size(name: str, argument: str, mask: torch.Tensor, needed: int) -> None:
    """Raise for a mask, or a buffer of one, that ends before the last pair."""
    if mask.numel() < needed:
        raise ValueError(
            f"{name}: {argument} must have at least {needed} elements for all queries and keys, "
            f"got {mask.numel()}"
        )


def byte_bounds(sizes: torch.Tensor) -> torch.Tensor:
    """Return where the bytes of each request start, ``[batch + 1]``, int32."""
    return torch.nn.functional.pad(((sizes + 7) // 8).cumsum(0), (1, 0)).int()


def packed(
    custom_mask: torch.Tensor, sizes: torch.Tensor, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a mask; return the bits and where each request starts. Waits for nothing."""
    flat = custom_mask.contiguous().view(-1)
    bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    bounds = bounds.to(flat.device, non_blocking=True)  # Nothing else writes them.
    if into is None:
        most = (flat.numel() + 7 * sizes.numel()) // 8
        into = torch.empty(most, dtype=torch.uint8, device=flat.device)
    return segment_packbits(flat, bounds, "little", into)
