# SPDX-License-Identifier: Apache-2.0
"""Quantising to fp8 on the way into a paged KV cache: rows read once, half the bytes written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case, script
from _paged import BATCHES, DIM, HEADS, MLA, Arguments, keys_and_values, mla_entries, put

SCALE = 0.05

Function = Callable[..., Any]


def _kv(fn: Function) -> Function:
    return lambda k, v, cache, b, p, ids, ptr, last, slots: fn(k, v, slots, cache, SCALE, SCALE)


def _mla(fn: Function) -> Function:
    return lambda c, k, cc, kc, b, p, ids, ptr, last, slots: fn(c, k, slots, cc, kc, SCALE)


def _eager(k: Any, v: Any, cache: Any, *indices: Any) -> None:
    put(cache[:, 0], indices[-1], k, SCALE)
    put(cache[:, 1], indices[-1], v, SCALE)


def _eager_mla(ckv: Any, kpe: Any, ckv_cache: Any, kpe_cache: Any, *indices: Any) -> None:
    put(ckv_cache, indices[-1], ckv, SCALE)
    put(kpe_cache, indices[-1], kpe, SCALE)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    #   op, elements of a token, arguments, our call, plain PyTorch
    kinds: list[tuple[str, int, Callable[..., Arguments], Function, Function]] = [
        (
            "fp8_quantize_append_paged_kv_cache_with_slot_mapping",
            2 * HEADS * DIM,
            keys_and_values,
            _kv,
            _eager,
        ),
        (
            "fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping",
            sum(MLA),
            mla_entries,
            _mla,
            _eager_mla,
        ),
    ]
    for op, size, make, bind, eager in kinds:
        for batch, length in BATCHES:
            yield Case(
                op,
                f"bs{batch} L{length}",
                batch * length * size * (dtype.itemsize + 1),
                lambda make=make, sizes=(batch, length): make(*sizes, dtype, torch.float8_e4m3fn),
                bind,
                eager,
            )


if __name__ == "__main__":
    script(__file__)
