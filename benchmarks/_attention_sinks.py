# SPDX-License-Identifier: Apache-2.0
"""Cases of attention with sinks, each beside the same call without them.

A sink is one more term of each row's sum, so it should cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _attention import PAGE, Arguments, Batch, Function, on_host, workspace
from _harness import Case

import precast
from precast.testing.tolerances import tolerance_of_attention

WRAPPER, XQA_BATCH = "BatchAttentionWithAttentionSinkWrapper", "xqa_batch_decode_with_kv_cache"
#: Query heads, KV heads and head size: Llama 3's and gpt-oss's.
HEADS = ((32, 8, 128), (64, 8, 64))
PREFILLS = ((2, 128), (1, 4096), (8, 2048))
DECODES = ((8, 4096), (64, 4096))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for heads in HEADS:
        for count, tokens in PREFILLS:
            batch = Batch([tokens] * count, [tokens] * count, *heads, dtype, dtype)
            yield _prefill(batch, f"{count} x {tokens}")
        for count, tokens in DECODES:
            batch = Batch([1] * count, [tokens] * count, *heads, dtype, dtype)
            yield _decode(batch, f"b{count} {tokens} sinks")


def _case(
    op: str,
    batch: Batch,
    shape: str,
    make: Callable[[], Arguments],
    bind: Callable[[Function], Function],
    without: Function,
    eager: Function | None,
) -> Case:
    """``make`` returns the sinks as the last argument."""
    return Case(
        op,
        f"{batch.label} {shape}",
        batch.bytes_moved,
        make,
        bind,
        eager,
        batch.flops,
        close=tolerance_of_attention(batch.dtype),
        reads=not batch.causal,
        without=without,
    )


def _sinks(batch: Batch, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(batch.qo_heads, device="cuda").to(like.device)


def _prefill(batch: Batch, shape: str) -> Case:
    scale = batch.dim**-0.5

    def make() -> Arguments:
        arguments = batch.paged()
        return *arguments, _sinks(batch, arguments[0])

    def bind(wrapper: Function, is_plain: bool = False) -> Function:
        planned: list[Any] = []

        def call(q: Any, k: Any, v: Any, *rest: Any) -> Any:
            if not planned:
                planned.append(wrapper(workspace(q), "NHD"))
                batch.plan_paged(planned[0], *on_host(rest[:-1]))
            return planned[0].run(q, (k, v), *(() if is_plain else (rest[-1], scale)))

        return call

    def eager(q: Any, k: Any, v: Any, rows: Any, starts: Any, pages: Any, last: Any, s: Any) -> Any:
        """Of requests whose pages are full."""
        count, n = len(batch.lengths), batch.lengths[0]
        groups = batch.qo_heads // batch.kv_heads
        keys, values = (
            x[pages.long()].view(count, n, *x.shape[2:]).repeat_interleave(groups, 2).float()
            for x in (k, v)
        )
        queries = q.view(count, n, *q.shape[1:]).float()
        logits = torch.einsum("bnhd,bmhd->bhnm", queries, keys) * scale
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
        more = s.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        shares = torch.cat([logits, more], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhnm,bmhd->bnhd", shares, values).flatten(0, 1).to(q.dtype)

    without = bind(precast.BatchPrefillWithPagedKVCacheWrapper, is_plain=True)
    small = eager if batch.lengths[0] <= PAGE * 8 else None  # It has all logits in memory.
    return _case(WRAPPER, batch, shape, make, bind, without, small)


def _decode(batch: Batch, shape: str) -> Case:
    def make() -> Arguments:
        q, k, v, _, indices, _ = batch.decode()
        lens = torch.tensor(batch.lengths, dtype=torch.int32, device=q.device)
        return q, k, v, indices.view(len(batch.lengths), -1), lens, _sinks(batch, q)

    def bind(function: Function, is_plain: bool = False) -> Function:
        scratch: list[torch.Tensor] = []

        def call(q: Any, k: Any, v: Any, table: Any, lens: Any, sinks: Any) -> Any:
            if not scratch:
                scratch.append(workspace(q).zero_())  # FlashInfer's must be zero at first.
            given = {"bmm1_scale": batch.dim**-0.5, "sinks": None if is_plain else sinks}
            longest = batch.lengths[0]
            return function(q, (k, v), scratch[0], table, lens, longest, kv_layout="NHD", **given)

        return call

    without = bind(precast.xqa_batch_decode_with_kv_cache, is_plain=True)
    return _case(XQA_BATCH, batch, shape, make, bind, without, None)
