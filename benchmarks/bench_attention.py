# SPDX-License-Identifier: Apache-2.0
"""Attention: decode over pages, prefill over rows and pages, wrappers that consist of others.

A wrapper plans at its first call, which is not measured: a model plans once and runs in every
layer. The routine attention_plan measures plans. Functions without a plan plan at every call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import _attention_composed
import _attention_functional
import _attention_sinks
import torch
from _attention import PAGE, Arguments, Batch, Function, on_host, workspace, zipf
from _harness import Case
from _script import script

from precast.testing.tolerances import tolerance_of_attention

E4M3 = torch.float8_e4m3fn
HEADS = ((32, 8), (64, 8))
#: Numbers of requests, and tokens of each.
DECODES = (
    *((1, 512), (1, 1024), (1, 4096), (1, 8192), (1, 65536), (8, 4096), (16, 1024), (16, 8192)),
    *((64, 1024), (64, 4096), (64, 16384), (256, 1024), (256, 4096)),
)
PREFILLS = ((1, 1024), (1, 4096), (1, 8192), (1, 16384), (1, 32768), (8, 2048), (32, 512))
#: Shapes with other numbers of heads, and with other head sizes.
MORE_PREFILLS = ((1, 4096), (1, 16384), (8, 2048))
FEW_DECODES, FEW_PREFILLS = ((1, 8192), (64, 4096)), ((1, 4096), (8, 2048))
#: Requests, tokens that they share, tokens of their own.
SHARED = (32, 8192, 256)
DECODE, PAGED = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"


def case(
    op: str,
    batch: Batch,
    shape: str,
    make: Callable[[], Arguments],
    bind: Callable[[Function], Function],
    eager: Function,
) -> Case:
    return Case(
        op,
        f"{batch.label} {shape}",
        batch.bytes_moved,
        make,
        bind,
        eager if batch.uniform and batch.window_left < 0 else None,
        batch.flops,
        # Probabilities are rounded to the dtype of queries.
        close=tolerance_of_attention(batch.dtype),
        reads=not batch.causal,
    )


def decode(batch: Batch, shape: str) -> Case:
    return case(DECODE, batch, shape, batch.decode, batch.run_decode, batch.eager_decode)


def paged(batch: Batch, shape: str) -> Case:
    return case(PAGED, batch, shape, batch.paged, batch.run_paged, batch.eager_paged)


def ragged(batch: Batch, shape: str) -> Case:
    return case(RAGGED, batch, shape, batch.ragged, batch.run_ragged, batch.eager_ragged)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Batches with queries of ``dtype``, and keys and values of ``dtype`` or e4m3."""
    yield from _decodes(dtype)
    yield from _prefills(dtype)
    yield _cascade(dtype)
    yield from _attention_composed.cases(dtype)
    yield from _attention_functional.cases(dtype)
    yield from _attention_sinks.cases(dtype)
    for tokens in (1024, 8192, 65536):
        batch = Batch([1], [tokens], dtype=dtype, kv_dtype=dtype)
        yield case(
            "single_decode_with_kv_cache",
            batch,
            str(tokens),
            lambda batch=batch: (batch.ragged()[0][0], *batch.ragged()[1:3]),
            lambda function: lambda q, k, v: function(q, k, v),
            lambda q, k, v, batch=batch: batch.eager_ragged(q[None], k, v)[0],
        )
    for tokens in (1024, 8192):
        batch = Batch([tokens], [tokens], dtype=dtype, kv_dtype=dtype)
        yield case(
            "single_prefill_with_kv_cache",
            batch,
            str(tokens),
            lambda batch=batch: batch.ragged()[:3],
            lambda function: lambda q, k, v: function(q, k, v, causal=True),
            batch.eager_ragged,
        )


def _decodes(dtype: torch.dtype) -> Iterator[Case]:
    kinds = [(*heads, 128, kv, DECODES) for heads in HEADS for kv in (dtype, E4M3)]
    kinds += [(32, 8, dim, dtype, FEW_DECODES) for dim in (64, 256)]
    for qo_heads, kv_heads, dim, kv_dtype, rows in kinds:
        rest = qo_heads, kv_heads, dim, dtype, kv_dtype
        for count, tokens in rows:
            yield decode(Batch([1] * count, [tokens] * count, *rest), f"b{count} {tokens}")
        if dim == 128:
            lengths = zipf()
            yield decode(Batch([1] * len(lengths), lengths, *rest), f"b{len(lengths)} Zipf")


def _prefills(dtype: torch.dtype) -> Iterator[Case]:
    kinds = [(32, 8, 128, PREFILLS), (64, 8, 128, MORE_PREFILLS)]
    kinds += [(32, 8, dim, FEW_PREFILLS) for dim in (64, 256)]
    for *sizes, rows in kinds:
        for count, tokens in rows:
            lengths = [tokens] * count
            batch = Batch(lengths, lengths, *sizes, dtype, dtype)
            yield ragged(batch, f"{count} x {tokens}")
            yield paged(batch, f"{count} x {tokens}")


# -- a shared prefix ------------------------------------------------------------------------------


def _cascade(dtype: torch.dtype) -> Case:
    """One query of each request attends to a shared prefix and to its own tokens, merged."""
    count, prefix, own = SHARED
    top = Batch([count], [prefix], dtype=dtype, kv_dtype=dtype)
    below = Batch([1] * count, [own] * count, dtype=dtype, kv_dtype=dtype)

    def make() -> Arguments:
        q, k, v, *table = below.paged()
        _, shared_k, shared_v, *shared_table = top.paged()
        return q, k, v, shared_k, shared_v, *table, *shared_table

    def bind(wrapper: Function) -> Function:
        merge = library(wrapper).merge_state_in_place
        planned: list[Any] = []

        def call(q: Any, k: Any, v: Any, shared_k: Any, shared_v: Any, *tables: Any) -> Any:
            if not planned:
                planned.extend(wrapper(workspace(q), "NHD") for _ in range(2))
                for level, table in zip(planned, (tables[:4], tables[4:]), strict=True):
                    heads = 32, 8, 128, PAGE
                    level.plan(*on_host(table), *heads, q_data_type=dtype, kv_data_type=dtype)
            out, lse = planned[1].run(q, (shared_k, shared_v), return_lse=True)
            merge(out, lse, *planned[0].run(q, (k, v), return_lse=True))
            return out, lse

        return call

    moved = below.bytes_moved + top.bytes_moved
    close = tolerance_of_attention(dtype)
    shape = f"{below.label} b{count} {prefix} shared, {own} of their own"
    flops = below.flops + 4 * count * prefix * 32 * 128
    return Case(PAGED, shape, moved, make, bind, None, flops, close=close, reads=True)


def library(wrapper: Any) -> Any:
    """The package of a wrapper, with or without options of a peer."""
    made = getattr(wrapper, "func", wrapper)
    return importlib.import_module(made.__module__.partition(".")[0])


if __name__ == "__main__":
    script(__file__)
