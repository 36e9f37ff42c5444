# SPDX-License-Identifier: Apache-2.0
"""Appends to a paged KV cache that quantise to NVFP4: rows read once, 9 bytes written for 32.

A quantisation and separate appends of codes and scales write those 9 bytes and read them again. So
by bytes the fused op takes 41/59 of the time of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case, Parts
from _paged import BATCHES, DIM, HEADS, Arguments, keys_and_values, put
from _script import script

import precast
from precast.quantization import nvfp4_kv_quantize_reference

SCALE = 0.002
BYTES = 1 / 2 + 1 / 16  # that an element has in the cache
SLOTS = -3  # among the arguments; behind them are the scales of blocks and the scale as a tensor

Function = Callable[..., Any]


def _by_table(fn: Function) -> Function:
    def call(k: Any, v: Any, cache: Any, batch: Any, positions: Any, *rest: Any) -> None:
        fn(k, v, batch, positions, cache, rest[-2], *rest[:3], SCALE, SCALE)

    return call


def _by_slots(fn: Function) -> Function:
    return lambda k, v, cache, *rest: fn(k, v, rest[SLOTS], cache, rest[-2], SCALE, SCALE)


def _eager(k: Any, v: Any, cache: Any, *rest: Any) -> None:
    for i, rows in enumerate((k, v)):
        codes, scales = nvfp4_kv_quantize_reference(rows, rest[-1])
        put(cache[:, i], rest[SLOTS], codes)
        put(rest[-2].view(torch.uint8)[:, i], rest[SLOTS], scales.view(torch.uint8))


def _parts(k: Any, v: Any, cache: Any, *rest: Any) -> None:
    (keys, key_scales), (values, value_scales) = (
        precast.nvfp4_kv_quantize(row, rest[-1]) for row in (k, v)
    )
    append = precast.append_paged_kv_cache_with_slot_mapping
    append(keys, values, rest[SLOTS], cache)
    scales = (t.view(torch.uint8) for t in (key_scales, value_scales))
    append(*scales, rest[SLOTS], rest[-2].view(torch.uint8))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    if dtype.itemsize != 2:
        return

    def arguments(batch: int, length: int) -> Arguments:
        made = keys_and_values(batch, length, dtype, torch.uint8)
        cache = made[2].view(torch.uint8)
        codes = cache[..., : DIM // 2].contiguous()
        finite = cache[..., : DIM // 16] % 64  # No bits of a NaN, which equals nothing.
        scales = finite.contiguous().view(torch.float8_e4m3fn)
        g = torch.empty(1, device="cuda").fill_(SCALE)
        return (*made[:2], codes, *made[3:], scales, g)

    name = "nvfp4_quantize_append_paged_kv_cache"
    for op, bind in ((name, _by_table), (f"{name}_with_slot_mapping", _by_slots)):
        for batch, length in BATCHES:
            elements = batch * length * 2 * HEADS * DIM
            yield Case(
                op,
                f"bs{batch} L{length}",
                int(elements * (dtype.itemsize + BYTES)),
                lambda sizes=(batch, length): arguments(*sizes),
                bind,
                _eager,
                parts=Parts(_parts, int(elements * (dtype.itemsize + 3 * BYTES))),
            )


if __name__ == "__main__":
    script(__file__)
