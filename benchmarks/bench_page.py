# SPDX-License-Identifier: Apache-2.0
"""Appending to a paged KV cache: each row read once and written once, at places by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _paged import BATCHES, DIM, HEADS, MLA, Arguments, keys_and_values, mla_entries, put
from _script import script

Function = Callable[..., Any]


def _table(fn: Function) -> Function:
    return lambda k, v, cache, b, p, ids, ptr, last, slots: fn(k, v, b, p, cache, ids, ptr, last)


def _slots(fn: Function) -> Function:
    return lambda k, v, cache, b, p, ids, ptr, last, slots: fn(k, v, slots, cache)


def _mla_table(fn: Function) -> Function:
    return lambda c, k, cc, kc, b, p, ids, ptr, last, slots: fn(c, k, b, p, cc, kc, ids, ptr, last)


def _mla_slots(fn: Function) -> Function:
    return lambda c, k, cc, kc, b, p, ids, ptr, last, slots: fn(c, k, slots, cc, kc)


def _eager(k: Any, v: Any, cache: Any, *indices: Any) -> None:
    put(cache[:, 0], indices[-1], k)
    put(cache[:, 1], indices[-1], v)


def _eager_mla(ckv: Any, kpe: Any, ckv_cache: Any, kpe_cache: Any, *indices: Any) -> None:
    put(ckv_cache, indices[-1], ckv)
    put(kpe_cache, indices[-1], kpe)


def _eager_positions(indptr: Any, lens: Any, batch_indices: Any, positions: Any) -> Any:
    rows = torch.arange(batch_indices.numel(), device=indptr.device)
    request = torch.searchsorted(indptr, rows, right=True) - 1
    batch_indices.copy_(request)
    positions.copy_(rows + lens[request] - indptr[request + 1])
    return batch_indices, positions


def cases(dtype: torch.dtype) -> Iterator[Case]:
    kv, entry = 2 * HEADS * DIM * dtype.itemsize, sum(MLA) * dtype.itemsize
    #   op, bytes of a token, arguments, our call, plain PyTorch
    kinds: list[tuple[str, int, Callable[..., Arguments], Function, Function]] = [
        ("append_paged_kv_cache", kv, keys_and_values, _table, _eager),
        ("append_paged_kv_cache_with_slot_mapping", kv, keys_and_values, _slots, _eager),
        ("append_paged_mla_kv_cache", entry, mla_entries, _mla_table, _eager_mla),
        ("append_paged_mla_kv_cache_with_slot_mapping", entry, mla_entries, _mla_slots, _eager_mla),
    ]
    for op, size, make, bind, eager in kinds:
        for batch, length in BATCHES:
            yield Case(
                op,
                f"bs{batch} L{length}",
                2 * batch * length * size,
                lambda make=make, sizes=(batch, length): make(*sizes, dtype),
                bind,
                eager,
            )
    for batch, length in BATCHES:

        def positions(batch: int = batch, length: int = length) -> Arguments:
            out = torch.empty(2, batch * length, dtype=torch.int32, device="cuda")
            indptr = torch.arange(batch + 1, dtype=torch.int32, device=out.device) * length
            lens = torch.full((batch,), length + 7, dtype=torch.int32, device=out.device)
            return indptr, lens, out[0], out[1]

        yield Case(
            "get_batch_indices_positions",
            f"bs{batch} L{length}",
            8 * batch * length,
            positions,
            lambda fn: lambda indptr, lens, b, p: fn(indptr, lens, b.numel(), b, p),
            _eager_positions,
        )


if __name__ == "__main__":
    script(__file__)
