# SPDX-License-Identifier: Apache-2.0
"""Count the queries and the tokens of requests."""

from __future__ import annotations

from operator import sub

from precast._base.torch import torch

#: Up to this many requests Python's numbers are faster than PyTorch's functions, which take 1 to
#: 2 us each.
_FEW = 96


def tokens_of_pages(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Count the tokens of each request, ``[batch]``."""
    if kv_indptr.shape[0] != kv_last_page_len.shape[0] + 1:
        raise ValueError(
            f"indptr of pages must have one element more than last_page_len, got "
            f"{kv_indptr.shape[0]} and {kv_last_page_len.shape[0]}"
        )
    full_pages = kv_indptr.diff().sub_(1).clamp_(min=0)
    return full_pages.mul_(page_size) + kv_last_page_len


def total_and_longest(indptr: torch.Tensor, longest: int | None = None) -> tuple[int, int]:
    """Return where the last request of ``indptr`` ends, and the most elements of a request.

    ``longest`` is the second if the caller knows it.
    """
    if indptr.shape[0] > _FEW:
        return int(indptr[-1]), longest or int(indptr.diff().max())
    bounds = indptr.tolist()
    if not bounds:
        raise ValueError("qo_indptr must have at least 1 element, got shape [0]")
    return bounds[-1], longest or max(map(sub, bounds[1:], bounds), default=0)


def longest_kv(
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    page_size: int,
    kv_len: torch.Tensor | None = None,
) -> int | None:
    """Return the most tokens of a request; None if there is no request."""
    requests = kv_indptr.shape[0] - 1
    if kv_len is not None:
        return int(kv_len.max()) if kv_len.numel() else None
    if kv_last_page_len is None:
        return total_and_longest(kv_indptr)[1] if requests > 0 else None
    if requests > _FEW or requests != kv_last_page_len.shape[0]:
        lengths = tokens_of_pages(kv_indptr, kv_last_page_len, page_size)
        return int(lengths.max()) if lengths.numel() else None
    bounds = kv_indptr.tolist()
    tokens = [
        max(end - begin - 1, 0) * page_size + last
        for begin, end, last in zip(bounds, bounds[1:], kv_last_page_len.tolist())
    ]
    return max(tokens, default=None)


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
    kv_len = tokens_of_pages(tokens, last[0], page_size) if last else tokens.diff()
    return rows.diff().long() * kv_len
