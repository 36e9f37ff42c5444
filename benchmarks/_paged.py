# SPDX-License-Identifier: Apache-2.0
"""Arguments of ops that append to a paged KV cache, and these ops in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

HEADS, DIM, PAGE = 8, 128, 16
MLA = (512, 64)
#: Requests and the tokens that each appends: decode steps, prefills.
BATCHES = ((1, 1), (64, 1), (256, 1), (4, 4096), (8, 8192))

Arguments = tuple[Any, ...]


def _ragged(batch: int, length: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """A page table of requests that hold ``length`` tokens after the append, and slots."""
    pages = -(-length // PAGE)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * pages
    indices = torch.randperm(batch * pages, device=device).int()
    last = torch.full((batch,), (length - 1) % PAGE + 1, dtype=torch.int32, device=device)
    requests = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(length)
    positions = torch.arange(length, dtype=torch.int32, device=device).repeat(batch)
    page = indices[(indptr[requests.long()] + positions // PAGE).long()]
    return requests, positions, indices, indptr, last, page.long() * PAGE + positions % PAGE


def keys_and_values(
    batch: int, length: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> Arguments:
    """Keys, values, cache, batch indices, positions, the three tensors of the page table, slots."""
    tokens, pages = batch * length, batch * -(-length // PAGE)
    rows = [torch.randn(tokens, HEADS, DIM, device="cuda").to(dtype) for _ in range(2)]
    cache = torch.randn(pages, 2, PAGE, HEADS, DIM, device="cuda").to(cache_dtype or dtype)
    return (*rows, cache, *_ragged(batch, length, cache.device))


def mla_entries(
    batch: int, length: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> Arguments:
    """The same with the two parts of entries and two caches."""
    tokens, pages = batch * length, batch * -(-length // PAGE)
    rows = [torch.randn(tokens, dim, device="cuda").to(dtype) for dim in MLA]
    caches = [torch.randn(pages, PAGE, d, device="cuda").to(cache_dtype or dtype) for d in MLA]
    return (*rows, *caches, *_ragged(batch, length, caches[0].device))


def put(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float = 0.0) -> None:
    """Write rows to slots of ``[pages, page_size, ...]`` by indexing, divided by a scale."""
    if scale:
        rows = (rows.float() / scale).clamp(-448, 448).to(cache.dtype)
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[slots // PAGE, slots % PAGE] = rows
