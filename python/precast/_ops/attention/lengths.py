# SPDX-License-Identifier: Apache-2.0
"""Find the longest request of a batch whose lengths are on the host."""

from __future__ import annotations

from operator import sub

from precast._base.torch import torch
from precast._ops.attention.reference import tokens_of_pages

#: Up to this many requests Python's numbers are faster than PyTorch's functions, which take 1 to
#: 2 us each.
_FEW = 48


def total_and_longest(indptr: torch.Tensor, longest: int | None = None) -> tuple[int, int]:
    """Return where the last request of ``indptr`` ends, and the most elements of a request.

    ``longest`` is the second if the caller knows it.
    """
    if indptr.shape[0] > _FEW:
        return int(indptr[-1]), longest or int(indptr.diff().max())
    bounds = indptr.tolist()
    return bounds[-1], longest or max(map(sub, bounds[1:], bounds), default=0)


def longest_kv(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor | None, page_size: int
) -> int | None:
    """Return the most tokens of a request; None if there is no request."""
    requests = kv_indptr.shape[0] - 1
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
