# SPDX-License-Identifier: Apache-2.0
"""Appending to a paged KV cache: each row read once and written once, at places by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case, script

HEADS, DIM, PAGE = 8, 128, 16
#: Batch and tokens of each request that are appended: decode steps, a prefill.
BATCHES = ((1, 1), (64, 1), (256, 1), (4, 4096), (8, 8192))
MLA = (512, 64)

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


def _ragged(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """A page table of requests that hold ``length`` tokens after the append, and slots."""
    pages = -(-length // PAGE)
    device = "cuda"
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * pages
    indices = torch.randperm(batch * pages, device=device).int()
    last = torch.full((batch,), (length - 1) % PAGE + 1, dtype=torch.int32, device=device)
    requests = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(length)
    positions = torch.arange(length, dtype=torch.int32, device=device).repeat(batch)
    page = indices[(indptr[requests.long()] + positions // PAGE).long()]
    return requests, positions, indices, indptr, last, page.long() * PAGE + positions % PAGE


def _kv(batch: int, length: int, dtype: torch.dtype, to: torch.dtype | None = None) -> Arguments:
    tokens, pages = batch * length, batch * -(-length // PAGE)
    rows = [torch.randn(tokens, HEADS, DIM, device="cuda").to(dtype) for _ in range(2)]
    cache = torch.randn(pages, 2, PAGE, HEADS, DIM, device="cuda").to(to or dtype)
    return (*rows, cache, *_ragged(batch, length))


def _mla(batch: int, length: int, dtype: torch.dtype) -> Arguments:
    tokens, pages = batch * length, batch * -(-length // PAGE)
    rows = [torch.randn(tokens, dim, device="cuda").to(dtype) for dim in MLA]
    caches = [torch.randn(pages, PAGE, dim, device="cuda").to(dtype) for dim in MLA]
    return (*rows, *caches, *_ragged(batch, length))


def _table(fn: Function) -> Function:
    return lambda k, v, cache, b, p, ids, ptr, last, slots: fn(k, v, b, p, cache, ids, ptr, last)


def _slots(fn: Function) -> Function:
    return lambda k, v, cache, b, p, ids, ptr, last, slots: fn(k, v, slots, cache)


def _fp8(fn: Function) -> Function:
    return lambda k, v, cache, b, p, ids, ptr, last, slots: fn(k, v, slots, cache, 0.05, 0.05)


def _mla_table(fn: Function) -> Function:
    return lambda c, k, cc, kc, b, p, ids, ptr, last, slots: fn(c, k, b, p, cc, kc, ids, ptr, last)


def _mla_slots(fn: Function) -> Function:
    return lambda c, k, cc, kc, b, p, ids, ptr, last, slots: fn(c, k, slots, cc, kc)


def _eager(k: Any, v: Any, cache: Any, b: Any, p: Any, *rest: Any) -> None:
    slots = rest[-1]
    cache[slots // PAGE, 0, slots % PAGE] = k
    cache[slots // PAGE, 1, slots % PAGE] = v


def cases(dtype: torch.dtype) -> Iterator[Case]:
    row = HEADS * DIM
    fp8 = torch.float8_e4m3fn
    #   op, bytes read and written a token, arguments, our call, plain PyTorch
    kinds: list[tuple[str, int, Callable[..., Arguments], Function, Function | None]] = [
        ("append_paged_kv_cache", 4 * row * dtype.itemsize, _kv, _table, _eager),
        ("append_paged_kv_cache_with_slot_mapping", 4 * row * dtype.itemsize, _kv, _slots, None),
        (
            "fp8_quantize_append_paged_kv_cache_with_slot_mapping",
            2 * row * (dtype.itemsize + 1),
            lambda *sizes: _kv(*sizes, fp8),
            _fp8,
            None,
        ),
        ("append_paged_mla_kv_cache", 2 * sum(MLA) * dtype.itemsize, _mla, _mla_table, None),
        (
            "append_paged_mla_kv_cache_with_slot_mapping",
            2 * sum(MLA) * dtype.itemsize,
            _mla,
            _mla_slots,
            None,
        ),
    ]
    for op, bytes_a_token, make, bind, eager in kinds:
        for batch, length in BATCHES:
            yield Case(
                op,
                f"bs{batch} L{length}",
                batch * length * bytes_a_token,
                lambda make=make, sizes=(batch, length): make(*sizes, dtype),
                bind,
                eager,
            )
    for batch, length in BATCHES:

        def positions(batch: int = batch, length: int = length) -> Arguments:
            indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
            lens = torch.full((batch,), length + 7, dtype=torch.int32, device="cuda")
            out = torch.empty(2, batch * length, dtype=torch.int32, device="cuda")
            return indptr, lens, out[0], out[1]

        yield Case(
            "get_batch_indices_positions",
            f"bs{batch} L{length}",
            8 * batch * length,
            positions,
            lambda fn: lambda indptr, lens, b, p: fn(indptr, lens, b.numel(), b, p),
        )


if __name__ == "__main__":
    script(__file__)
