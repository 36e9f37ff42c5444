# SPDX-License-Identifier: Apache-2.0
"""Attention without a plan by the caller: each call plans and runs, as engines call it in a layer.

Decodes have shapes that the decode wrapper has rows of, too, whose runs are of a plan that was made
before: what a call costs besides is the CPU's time, and the work that CTAs find themselves or, with
more than 256 requests, with many drafts or a mask, the planning kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from _attention import PAGE, Arguments, Batch, Function, workspace
from _harness import Case

from precast.testing.tolerances import tolerance_of_attention

E4M3 = torch.float8_e4m3fn
XQA_BATCH, TRTLLM = "xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache"
#: Numbers of requests, and tokens of each.
DECODES = (
    *((1, 512), (1, 1024), (1, 4096), (1, 8192), (1, 65536), (8, 4096), (16, 1024), (16, 8192)),
    *((64, 1024), (64, 4096), (64, 16384), (256, 1024)),
)
FEW_DECODES = ((1, 1024), (64, 4096))
#: Newest tokens of each request, without a mask and with one, as engines pass it.
DRAFTS = ((8, 4096, 4), (64, 4096, 4))
PREFILLS = ((1, 1024), (1, 4096), (8, 2048))
SEMAPHORES = 8 << 20


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Batches with queries of ``dtype``, and keys and values of ``dtype`` or e4m3."""
    for kv_dtype in (dtype, E4M3):
        kind = 32, 8, 128, dtype, kv_dtype
        for count, tokens in DECODES:
            batch = Batch([1] * count, [tokens] * count, *kind)
            yield _decode(XQA_BATCH, batch, f"b{count} {tokens}")
        for count, tokens in FEW_DECODES:
            batch = Batch([1] * count, [tokens] * count, *kind)
            yield _decode(TRTLLM, batch, f"b{count} {tokens}")
            yield _xqa(batch, f"b{count} {tokens}")
        for count, tokens, each in DRAFTS:
            batch = Batch([each] * count, [tokens] * count, *kind)
            yield _decode(XQA_BATCH, batch, f"b{count} x {each} {tokens}")
            yield _decode(XQA_BATCH, batch, f"b{count} x {each} {tokens} mask", is_masked=True)
        for count, tokens in PREFILLS:
            batch = Batch([tokens] * count, [tokens] * count, *kind)
            yield _context(batch, f"{count} x {tokens}")
            if kv_dtype is dtype:
                yield _fmha_v2(batch, f"{count} x {tokens}")


# -- over a block table ---------------------------------------------------------------------------


def _arguments(batch: Batch) -> Arguments:
    """Queries, keys and values, a block table whose rows are full, and lengths."""
    q, k, v, _, indices, _ = batch.decode()
    lens = torch.tensor(batch.lengths, dtype=torch.int32, device=q.device)
    return q, k, v, indices.view(len(batch.lengths), -1), lens


def _masked(batch: Batch) -> Arguments:
    """The same, and a mask that says what is the default."""
    q, *rest = _arguments(batch)
    rows = torch.tensor([[(2 << i) - 1, 0] for i in range(batch.queries[0])], dtype=torch.int16)
    mask = rows.view(torch.uint16).expand(len(batch.queries), -1, -1)
    return q, *rest, mask.contiguous().to(q.device)


def _table_case(op: str, batch: Batch, shape: str, bind: Any, **more: Any) -> Case:
    def eager(q: Any, k: Any, v: Any, table: Any, *rest: Any) -> Any:
        return batch.eager_decode(q, k, v, None, table.view(-1), None)

    return Case(
        op,
        f"{batch.label} {shape}",
        batch.bytes_moved,
        **{
            "make": lambda: _arguments(batch),
            "bind": bind,
            "eager": eager,
            "flops": batch.flops,
            "close": tolerance_of_attention(batch.dtype),
            **more,
        },
    )


def _decode(op: str, batch: Batch, shape: str, is_masked: bool = False) -> Case:
    each, tokens = batch.queries[0], batch.lengths[0]

    def bind(function: Function) -> Function:
        scratch: list[torch.Tensor] = []

        def call(q: Any, k: Any, v: Any, table: Any, lens: Any, mask: Any = None) -> Any:
            if not scratch:
                scratch.append(workspace(q).zero_())  # FlashInfer's must be zero at first.
            given = {"bmm1_scale": batch.dim**-0.5, "q_len_per_req": each, "mask": mask}
            return function(q, (k, v), scratch[0], table, lens, tokens, kv_layout="NHD", **given)

        return call

    more: dict[str, Any] = {"whole": bind, "reads": True}
    if is_masked:
        more["make"] = lambda: _masked(batch)
    return _table_case(op, batch, shape, bind, **more)


def _xqa(batch: Batch, shape: str) -> Case:
    def bind(function: Function) -> Function:
        scratch: list[torch.Tensor] = []

        def call(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
            if not scratch:
                whole = workspace(q).zero_()
                scratch.extend((whole[SEMAPHORES:], whole[:SEMAPHORES]))
            out = torch.empty_like(q)
            tensors = q.unsqueeze(1), k, v, table, lens.unsqueeze(1), out.unsqueeze(1)
            function(*tensors, *scratch, batch.kv_heads, PAGE)
            return out

        return call

    return _table_case("xqa", batch, shape, bind, whole=bind, reads=True)


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

    return _table_case("trtllm_batch_context_with_kv_cache", batch, shape, bind)


# -- ragged ---------------------------------------------------------------------------------------


def _fmha_v2(batch: Batch, shape: str) -> Case:
    """Ragged queries, keys and values, as those of the wrapper."""
    count, tokens = len(batch.lengths), batch.lengths[0]

    def bind(function: Function) -> Function:
        scratch: list[torch.Tensor] = []

        def call(q: Any, k: Any, v: Any, bounds: Any, kv_bounds: Any) -> Any:
            if not scratch:
                scratch.extend((workspace(q).zero_(), kv_bounds.diff()))
            scale = 1 / math.sqrt(batch.dim)
            sizes = scratch[1], tokens, tokens, scale, 1.0, count, bounds, kv_bounds
            return function((q, k, v), "SEPARATE_Q_K_V", scratch[0], *sizes)

        return call

    return Case(
        "trtllm_fmha_v2_prefill",
        f"{batch.label} {shape}",
        batch.bytes_moved,
        batch.ragged,
        bind,
        batch.eager_ragged,
        batch.flops,
        close=tolerance_of_attention(batch.dtype),
    )
