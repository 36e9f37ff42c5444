# SPDX-License-Identifier: Apache-2.0
"""Masks of a batch as the kernels read them: bits, each request from a byte of its own on."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.attention.reference import tokens_of_pages
from precast._ops.quantize.packbits import segment_packbits


def paged_sizes(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    page_size: int,
    non_blocking: bool = False,
) -> torch.Tensor:
    """``[batch]``, int64: how many pairs of a query and a key each request has."""
    if qo_indptr.shape != kv_indptr.shape:
        raise ValueError(
            f"The length of qo_indptr and paged_kv_indptr should be the same, got "
            f"{qo_indptr.shape[0]} and {kv_indptr.shape[0]}"
        )
    rows, pages, last = _together(non_blocking, qo_indptr, kv_indptr, kv_last_page_len)
    return rows.diff().long() * tokens_of_pages(pages, last, page_size)


def ragged_sizes(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """The same for keys one behind the other."""
    if qo_indptr.shape != kv_indptr.shape:
        raise ValueError(
            f"The length of qo_indptr and kv_indptr should be the same, got "
            f"{qo_indptr.shape[0]} and {kv_indptr.shape[0]}"
        )
    rows, tokens = _together(non_blocking, qo_indptr, kv_indptr)
    return rows.diff().long() * tokens.diff()


def check_mask_size(name: str, argument: str, mask: torch.Tensor, needed: int) -> None:
    """Raise for a mask, or a buffer of one, that ends before the last pair."""
    if mask.numel() < needed:
        raise ValueError(
            f"{name}: {argument} must have at least {needed} elements for all queries and keys, "
            f"got {mask.numel()}"
        )


def _together(non_blocking: bool, *lengths: torch.Tensor) -> list[torch.Tensor]:
    """All on the GPU that one of them is on; lengths go there, and never the other way."""
    device = next((tensor.device for tensor in lengths if tensor.is_cuda), lengths[0].device)
    return [tensor.to(device, non_blocking=non_blocking) for tensor in lengths]


def byte_bounds(sizes: torch.Tensor) -> torch.Tensor:
    """``[batch + 1]``, int32: where the bytes of each request start."""
    return torch.nn.functional.pad(((sizes + 7) // 8).cumsum(0), (1, 0)).int()


def packed(
    custom_mask: torch.Tensor, sizes: torch.Tensor, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of a mask and where those of each request start; waits for nothing."""
    flat = custom_mask.contiguous().view(-1)
    bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    bounds = bounds.to(flat.device, non_blocking=True)  # Nobody else writes them.
    if into is None:
        most = (flat.numel() + 7 * sizes.numel()) // 8
        into = torch.empty(most, dtype=torch.uint8, device=flat.device)
    return segment_packbits(flat, bounds, "little", into)
