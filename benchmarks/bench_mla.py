# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over pages: a decode of 128 heads does as much work as it reads.

A wrapper plans at its first call, which is not measured, except in the rows that say so; functions
plan at every call. The views of queries and of the cache that a run takes are made once, because
they are the caller's: CPU time is that of ``plan()`` and ``run()``. The peer ``without`` is our
kernel of every GPU, without that of Hopper.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from _attention import SHARP, Arguments, Function, starts, workspace
from _harness import Case
from _script import script

import precast
from precast.testing.tolerances import tolerance_of_attention

E4M3 = torch.float8_e4m3fn
WRAPPER = "BatchMLAPagedAttentionWrapper"
FUNCTIONS = ("trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla")
CKV, KPE = 512, 64
#: 1 / sqrt of a head's 128 columns before absorption, and of RoPE's.
SM_SCALE = 1 / math.sqrt(128 + KPE)
#: Numbers of requests, and tokens of each, by number of heads.
DECODES = {
    128: ((1, 4096), (16, 1024), (16, 8192), (64, 1024), (64, 4096), (64, 8192), (128, 4096)),
    64: ((1, 4096), (64, 4096), (128, 4096)),
    32: ((1, 4096), (64, 4096), (128, 4096)),
    16: ((1, 4096), (4, 4096), (16, 1024), (16, 8192), (64, 4096), (64, 8192), (128, 4096)),
}
#: The same with a cache of e4m3, and over pages of these sizes.
FP8 = {128: ((16, 8192), (64, 4096)), 16: ((64, 8192), (128, 4096))}
PAGES, PAGED = (1, 8, 16), {128: ((16, 8192), (64, 4096)), 16: ((64, 8192),)}
#: Newest tokens of each request: drafts, and a chunk of a prompt.
CHUNKS = ((64, 4, 4096), (1, 512, 16384))
#: What functions are measured at: heads, requests and tokens.
CALLS = ((16, 1, 1024), (128, 64, 4096))


class Batch(NamedTuple):
    """Requests of the same length over full pages."""

    heads: int
    count: int
    tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page: int = 64
    queries: int = 1

    @property
    def label(self) -> str:
        parts = [f"h{self.heads}"]
        parts += ["e4m3 KV"] * (self.kv_dtype.itemsize == 1)
        parts += [f"pages of {self.page}"] * (self.page != 64)
        parts += [f"b{self.count}"]
        parts += [f"x {self.queries} of"] * (self.queries > 1)
        return " ".join([*parts, str(self.tokens)])

    @property
    def pairs(self) -> int:
        """Pairs of a query and a token that it sees."""
        return self.queries * self.tokens - self.queries * (self.queries - 1) // 2

    @property
    def bytes_moved(self) -> int:
        """Bytes of the cache once, of queries and of outputs."""
        cache = self.count * self.tokens * (CKV + KPE) * self.kv_dtype.itemsize
        rows = self.count * self.queries * self.heads
        return cache + rows * (CKV + KPE + CKV) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        return 2 * self.count * self.heads * self.pairs * (CKV + KPE + CKV)

    def make(self) -> Arguments:
        """Queries, the cache, where queries and pages of requests start, pages and lengths."""
        rows, pages = self.count * self.queries, -(-self.tokens // self.page)
        q = (torch.randn(rows, self.heads, CKV + KPE, device="cuda") * SHARP / 2).to(self.dtype)
        cache = torch.randn(self.count * pages, self.page, CKV + KPE, device="cuda")
        lens = torch.tensor([self.tokens] * self.count, dtype=torch.int32, device=q.device)
        return (
            *(q, cache.to(self.kv_dtype)),
            starts([self.queries] * self.count, q.device),
            starts([pages] * self.count, q.device),
            torch.randperm(self.count * pages, device=q.device).int(),
            lens,
        )

    def plan(self, wrapper: Any, *tables: Any) -> None:
        sizes = self.heads, CKV, KPE, self.page, self.queries > 1, SM_SCALE
        wrapper.plan(*tables, *sizes, self.dtype, self.kv_dtype)

    def run(self, wrapper: Function, plans: bool = False) -> Function:
        """Runs of a wrapper, which plans at the first or at every one."""
        made: list[Any] = []
        views: dict[tuple[int, int], tuple[Any, ...]] = {}
        is_fp8 = self.kv_dtype is E4M3
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if is_fp8 else {}

        def call(q: Any, cache: Any, *tables: Any) -> Any:
            is_new = not made
            if is_new:
                made.append(wrapper(workspace(q)))
            if is_new or plans:
                self.plan(made[0], *tables)
            # The tensors stand beside their views, so that no other ones have their ids.
            key = id(q), id(cache)
            if key not in views:
                views[key] = q, cache, *_halves(q), *_halves(cache)
            return made[0].run(*views[key][2:], **scales)

        return call

    def function(self, function: Function) -> Function:
        """Calls of a function, which takes a block table."""
        scratch: list[torch.Tensor] = []

        def call(q: Any, cache: Any, bounds: Any, kv_bounds: Any, pages: Any, lens: Any) -> Any:
            if not scratch:
                scratch.append(workspace(q).zero_())  # FlashInfer's must be zero at first.
            table = pages.view(self.count, -1)
            sizes = scratch[0], 128, CKV, KPE, table, lens, self.tokens
            out = function(q.unsqueeze(1), cache, *sizes, bmm1_scale=SM_SCALE)
            return out.view(-1, self.heads, CKV)

        return call

    def eager(self, q: Any, cache: Any, bounds: Any, kv_bounds: Any, pages: Any, lens: Any) -> Any:
        raw = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        k = raw[pages.long()].view(cache.dtype).to(q.dtype).view(self.count, -1, CKV + KPE)
        k = k[:, : self.tokens]
        rows = q.view(self.count, self.queries * self.heads, -1)
        scores = torch.bmm(rows, k.mT).float() * SM_SCALE
        if self.queries > 1:
            seen = torch.ones(self.queries, self.tokens, dtype=torch.bool, device=q.device)
            hidden = ~seen.tril(self.tokens - self.queries).repeat_interleave(self.heads, 0)
            scores = scores.masked_fill(hidden, -math.inf)
        out = torch.bmm(scores.softmax(-1).to(q.dtype), k[..., :CKV])
        return out.view(-1, self.heads, CKV)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Queries of ``dtype``, and caches of ``dtype`` or e4m3."""
    for kv_dtype, rows in ((dtype, DECODES), (E4M3, FP8)):
        for heads, sizes in rows.items():
            for count, tokens in sizes:
                yield _case(Batch(heads, count, tokens, dtype, kv_dtype))
    for page in PAGES:
        for heads, sizes in PAGED.items():
            for count, tokens in sizes:
                yield _case(Batch(heads, count, tokens, dtype, dtype, page))
    for count, queries, tokens in CHUNKS:
        yield _case(Batch(128, count, tokens, dtype, dtype, queries=queries))
    for heads, count, tokens in CALLS:
        batch = Batch(heads, count, tokens, dtype, dtype)
        yield _planned(batch)
        for op in FUNCTIONS:
            yield _made(op, batch, batch.label, batch.function, whole=batch.function)


def _case(batch: Batch) -> Case:
    of_all = functools.partial(getattr(precast, WRAPPER), backend="fa2")
    return _made(WRAPPER, batch, batch.label, batch.run, without=batch.run(of_all))


def _planned(batch: Batch) -> Case:
    bind = functools.partial(batch.run, plans=True)
    # A peer's plan may wait for the GPU. It then has no graph, only whole calls.
    return _made(WRAPPER, batch, f"{batch.label}: plan and run", bind, whole=bind)


def _made(op: str, batch: Batch, shape: str, bind: Any, **more: Any) -> Case:
    return Case(
        op,
        shape,
        batch.bytes_moved,
        batch.make,
        bind,
        batch.eager,
        batch.flops,
        # Probabilities are rounded to the dtype of queries.
        close=tolerance_of_attention(batch.dtype),
        reads=batch.queries == 1,
        **more,
    )


def _halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of the compressed part and of RoPE's, as views."""
    return rows[..., :CKV], rows[..., CKV:]


if __name__ == "__main__":
    script(__file__)
