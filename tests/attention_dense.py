# SPDX-License-Identifier: Apache-2.0
"""Attention of one request by its definition, in float64, and pages of random requests.

Shares nothing with the library; ``attention_naive`` does the same for whole batches with every
option, one logit after the other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

I32 = torch.int32


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[n, heads, dim]`` and base-2 log-sum-exps; ``mask`` is ``[n, m]``, True: seen."""
    # Heads that share keys have a dimension of their own, so that keys need not be repeated.
    queries = q.double().unflatten(1, (k.shape[1], -1))
    keys, values = k.double(), v.double()
    logits = torch.einsum("nkgd,mkd->kgnm", queries, keys).flatten(0, 1)
    logits = logits * (1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale)
    if logits_soft_cap:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks.double().view(-1, 1, 1).expand(*logits.shape[:2], 1)
        logits = torch.cat([logits, column], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).nan_to_num()
    outputs = torch.einsum("kgnm,mkd->nkgd", weights.unflatten(0, (k.shape[1], -1)), values)
    return outputs.flatten(1, 2), lse.t() / math.log(2)


def causal(n: int, m: int) -> torch.Tensor:
    """What ``n`` queries see that are the last of ``m`` tokens."""
    return torch.arange(m) <= torch.arange(n).unsqueeze(-1) + (m - n)


def indptr(lengths: list[int]) -> torch.Tensor:
    """Where each request starts."""
    return torch.tensor([0, *lengths]).cumsum(0).to(I32)


class Pages(NamedTuple):
    """Requests in pages of one cache, whose other entries are NaN."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    lengths: list[int]

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last_page_len

    def tokens(self, cache: torch.Tensor, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request from ``[pages, 2, page_size, heads, dim]``."""
        begin, end = self.indptr[request : request + 2].tolist()
        rows = cache[self.indices[begin:end].long()].transpose(1, 2).flatten(0, 1)
        k, v = rows[: self.lengths[request]].unbind(1)
        return k, v


def pages_of(lengths: list[int], page_size: int, free: torch.Tensor) -> tuple[Pages, torch.Tensor]:
    """Give each request pages of ``free``; return what is left of it, too."""
    counts = [-(-n // page_size) for n in lengths]
    last = [n - (c - 1) * page_size if c else 0 for n, c in zip(lengths, counts)]
    taken = sum(counts)
    pages = Pages(indptr(counts), free[:taken].to(I32), torch.tensor(last, dtype=I32), lengths)
    return pages, free[taken:]


def cache_of(
    levels: list[Pages],
    pages: int,
    page_size: int,
    heads: int,
    dim: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """A random cache ``[pages, 2, page_size, heads, dim]``; NaN where no request has a token."""
    shape = pages, 2, page_size, heads, dim
    cache = torch.full(shape, math.nan)
    for level in levels:
        for i, length in enumerate(level.lengths):
            begin, end = level.indptr[i : i + 2].tolist()
            for at, page in enumerate(level.indices[begin:end].tolist()):
                size = max(0, min(page_size, length - at * page_size))
                values = torch.randn(2, size, heads, dim, generator=generator)
                cache[page, :, :size] = values
    return cache.to(dtype)
