# SPDX-License-Identifier: Apache-2.0
"""Attention without a plan by the caller: each call plans and runs, as engines call it in a layer.

The peer ``parts`` is the wrapper's run alone, of a plan that was made before: what a call costs
besides it is the planning kernel, and the CPU's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _attention import PAGE, Arguments, Batch, Function, workspace
from _harness import Case, Parts
from _script import script

import precast
from precast.testing.tolerances import tolerance_of_attention

E4M3 = torch.float8_e4m3fn
XQA, CONTEXT = "xqa_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
FMHA_V2 = "trtllm_fmha_v2_prefill"
#: Numbers of requests, and tokens of each.
DECODES = tuple((count, tokens) for count in (1, 8, 32, 128) for tokens in (512, 4096, 16384))
#: Newest tokens of each request, with a mask as engines pass it.
DRAFTS = ((8, 4096, 4), (64, 4096, 4))
PREFILLS = ((1, 4096), (8, 2048))


def _arguments(batch: Batch) -> Callable[[], Arguments]:
    """Queries, keys and values, a block table whose rows are full, and lengths."""

    def make() -> Arguments:
        q, k, v, _, indices, _ = batch.decode()
        lens = torch.tensor(batch.lengths, dtype=torch.int32, device=q.device)
        return q, k, v, indices.view(len(batch.lengths), -1), lens

    return make


def _parts(batch: Batch) -> Parts:
    """The run of a wrapper that planned once."""
    planned: list[Any] = []

    def run(q: Any, k: Any, v: Any, table: Any, lens: Any, *rest: Any) -> Any:
        if not planned:
            count, pages = table.shape
            indptr = torch.arange(0, count * pages + 1, pages, dtype=torch.int32, device=q.device)
            last = (lens - 1) % PAGE + 1
            sizes = batch.qo_heads, batch.kv_heads, batch.dim, PAGE
            dtypes = {"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype}
            kind = precast.BatchDecodeWithPagedKVCacheWrapper
            wrapper = kind(workspace(q), "NHD", use_tensor_cores=True)
            each = batch.queries[0]
            wrapper.plan(indptr, table.view(-1), last, *sizes, **dtypes, q_len_per_req=each)
            planned.append(wrapper)
        return planned[0].run(q, (k, v), q_scale=1.0)

    return Parts(run, batch.bytes_moved)


def _decode(batch: Batch, shape: str, mask: bool = False) -> Case:
    each, tokens = batch.queries[0], batch.lengths[0]
    make = _arguments(batch)

    def masked() -> Arguments:
        rows = torch.tensor([[(2 << i) - 1, 0] for i in range(each)], dtype=torch.int16)
        draft = rows.view(torch.uint16).expand(len(batch.queries), -1, -1).contiguous()
        args = make()
        return *args, draft.to(args[0].device)

    def bind(function: Function) -> Function:
        scratch: list[torch.Tensor] = []

        def call(q: Any, k: Any, v: Any, table: Any, lens: Any, draft: Any = None) -> Any:
            if not scratch:
                scratch.append(workspace(q).zero_())  # FlashInfer's must be zero at first.
            given = {"bmm1_scale": batch.dim**-0.5, "q_len_per_req": each, "mask": draft}
            return function(q, (k, v), scratch[0], table, lens, tokens, kv_layout="NHD", **given)

        return call

    return Case(
        XQA,
        f"{batch.label} {shape}",
        batch.bytes_moved,
        masked if mask else make,
        bind,
        flops=batch.flops,
        parts=_parts(batch),
        close=tolerance_of_attention(batch.dtype),
        whole=bind,
        reads=True,
    )


def _context(batch: Batch, shape: str) -> Case:
    count, tokens = len(batch.lengths), batch.lengths[0]

    def bind(function: Function) -> Function:
        scratch: list[torch.Tensor] = []

        def call(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
            if not scratch:
                starts = torch.arange(0, q.shape[0] + 1, tokens, dtype=torch.int32, device=q.device)
                scratch.extend((workspace(q).zero_(), starts))
            sizes = tokens, tokens, batch.dim**-0.5, 1.0, count, scratch[1], scratch[1]
            return function(q, (k, v), scratch[0], table, lens, *sizes, kv_layout="NHD")

        return call

    return Case(
        CONTEXT,
        f"{batch.label} {shape}",
        batch.bytes_moved,
        _arguments(batch),
        bind,
        flops=batch.flops,
        close=tolerance_of_attention(batch.dtype),
    )


def _fmha_v2(batch: Batch, shape: str) -> Case:
    """Ragged queries, keys and values, as the wrapper of the routine attention has them."""
    count, tokens = len(batch.lengths), batch.lengths[0]

    def bind(function: Function) -> Function:
        scratch: list[torch.Tensor] = []

        def call(q: Any, k: Any, v: Any, bounds: Any, kv_bounds: Any) -> Any:
            if not scratch:
                scratch.extend((workspace(q).zero_(), kv_bounds.diff()))
            sizes = scratch[1], tokens, tokens, batch.dim**-0.5, 1.0, count, bounds, kv_bounds
            return function((q, k, v), "SEPARATE_Q_K_V", scratch[0], *sizes)

        return call

    return Case(
        FMHA_V2,
        f"{batch.label} {shape}",
        batch.bytes_moved,
        batch.ragged,
        bind,
        batch.eager_ragged,
        batch.flops,
        close=tolerance_of_attention(batch.dtype),
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Batches with queries of ``dtype``, and keys and values of ``dtype`` or e4m3."""
    for kv_dtype in (dtype, E4M3):
        kind = 32, 8, 128, dtype, kv_dtype
        for count, tokens in DECODES:
            batch = Batch([1] * count, [tokens] * count, *kind)
            yield _decode(batch, f"b{count} {tokens}")
        for count, tokens, each in DRAFTS:
            batch = Batch([each] * count, [tokens] * count, *kind)
            yield _decode(batch, f"b{count} x {each} {tokens}")
            yield _decode(batch, f"b{count} x {each} {tokens} mask", mask=True)
        for count, tokens in PREFILLS:
            batch = Batch([tokens] * count, [tokens] * count, *kind)
            yield _context(batch, f"{count} x {tokens}")
            if kv_dtype is dtype:
                yield _fmha_v2(batch, f"{count} x {tokens}")


if __name__ == "__main__":
    script(__file__)
