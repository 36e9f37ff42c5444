# SPDX-License-Identifier: Apache-2.0
"""Appends to a paged KV cache that quantise to fp8: rows read once, half the bytes written.

A quantisation and a separate append write the codes and read them again. With 16-bit rows they move
5 bytes an element, and the fused op moves 3. So by bytes it takes 0.6 of the time of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case, Parts
from _paged import BATCHES, DIM, HEADS, MLA, Arguments, keys_and_values, mla_entries, put
from _script import script

import precast

SCALE = 0.05
SLOTS = -2  # among the arguments; behind them is the scale as a tensor

Function = Callable[..., Any]


def _kv(fn: Function) -> Function:
    return lambda k, v, cache, *rest: fn(k, v, rest[SLOTS], cache, SCALE, SCALE)


def _mla(fn: Function) -> Function:
    return lambda c, k, cc, kc, *rest: fn(c, k, rest[SLOTS], cc, kc, SCALE)


def _eager(k: Any, v: Any, cache: Any, *rest: Any) -> None:
    put(cache[:, 0], rest[SLOTS], k, SCALE)
    put(cache[:, 1], rest[SLOTS], v, SCALE)


def _eager_mla(ckv: Any, kpe: Any, ckv_cache: Any, kpe_cache: Any, *rest: Any) -> None:
    put(ckv_cache, rest[SLOTS], ckv, SCALE)
    put(kpe_cache, rest[SLOTS], kpe, SCALE)


def _parts(k: Any, v: Any, cache: Any, *rest: Any) -> None:
    rows = [precast.static_quant_fp8(row, rest[-1]) for row in (k, v)]
    precast.append_paged_kv_cache_with_slot_mapping(*rows, rest[SLOTS], cache)


def _mla_parts(ckv: Any, kpe: Any, ckv_cache: Any, kpe_cache: Any, *rest: Any) -> None:
    rows = [precast.static_quant_fp8(row, rest[-1]) for row in (ckv, kpe)]
    precast.append_paged_mla_kv_cache_with_slot_mapping(*rows, rest[SLOTS], ckv_cache, kpe_cache)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def arguments(make: Callable[..., Arguments], batch: int, length: int) -> Arguments:
        made = make(batch, length, dtype, torch.float8_e4m3fn)
        return (*made, torch.empty(1, device="cuda").fill_(SCALE))

    #   op, elements of a token, arguments, our call, plain PyTorch, parts
    kinds: list[tuple[str, int, Callable[..., Arguments], Function, Function, Function]] = [
        (
            "fp8_quantize_append_paged_kv_cache_with_slot_mapping",
            2 * HEADS * DIM,
            keys_and_values,
            _kv,
            _eager,
            _parts,
        ),
        (
            "fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping",
            sum(MLA),
            mla_entries,
            _mla,
            _eager_mla,
            _mla_parts,
        ),
    ]
    for op, size, make, bind, eager, parts in kinds:
        for batch, length in BATCHES:
            elements = batch * length * size
            yield Case(
                op,
                f"bs{batch} L{length}",
                elements * (dtype.itemsize + 1),
                lambda make=make, sizes=(batch, length): arguments(make, *sizes),
                bind,
                eager,
                parts=Parts(parts, elements * (dtype.itemsize + 1 + 1 + 1)),
            )


if __name__ == "__main__":
    script(__file__)
