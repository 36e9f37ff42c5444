# SPDX-License-Identifier: Apache-2.0
"""Batches of attention: their arguments, calls of a library's wrapper, and plain PyTorch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from precast.testing import attention_flops_with_actual_seq_lens

PAGE = 16
#: Enough for FlashInfer's plans of these batches; ours need less.
WORKSPACE_BYTES = 384 << 20

#: Scale of decode queries, so that few tokens have most of the weight. Otherwise the mean of
#: thousands of values is near 0, and no check would find a wrong value.
SHARP = 4.0

Arguments = tuple[Any, ...]
Function = Callable[..., Any]


class Batch(NamedTuple):
    """Tokens of queries and of the KV cache of each request."""

    queries: Sequence[int]
    lengths: Sequence[int]
    qo_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    dim_vo: int = 0  # 0: as dim
    is_full: bool = False  # prefill without a causal mask
    window_left: int = -1
    page: int = PAGE
    on_device: bool = False  # plan() gets lengths of prefills on the device

    @property
    def causal(self) -> bool:
        return max(self.queries) > 1 and not self.is_full

    @property
    def dims(self) -> tuple[int, int]:
        return self.dim, self.dim_vo or self.dim

    @property
    def uniform(self) -> bool:
        return len({*self.queries}) == len({*self.lengths}) == 1

    @property
    def bytes_moved(self) -> int:
        """Bytes of the keys and values of each request once, of queries and of outputs."""
        cache = sum(self.lengths) * self.kv_heads * self.kv_dtype.itemsize * sum(self.dims)
        rows = sum(self.queries) * self.qo_heads
        return cache + rows * (
            self.dim * self.dtype.itemsize + self.dims[1] * self.o_dtype.itemsize
        )

    @property
    def o_dtype(self) -> torch.dtype:
        """The dtype of outputs, which have at least 16 bits."""
        return torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype

    @property
    def flops(self) -> int:
        seen = self.queries, self.lengths, *self.dims, self.qo_heads
        whole = attention_flops_with_actual_seq_lens(*seen, self.causal)
        if self.window_left < 0:
            return whole
        # What lies before the window: of a query at position p, p - window_left tokens.
        before = 0
        for n, m in zip(self.queries, self.lengths, strict=True):
            first, last = (max(0, p - self.window_left) for p in (m - n, m - 1))
            before += (first + last) * (last - first + 1) // 2
        return whole - 2 * before * self.qo_heads * sum(self.dims)

    @property
    def label(self) -> str:
        """The label of unusual heads, head size and dtype."""
        parts = [f"{self.qo_heads}/{self.kv_heads}"]
        dims = f"d{self.dim}/{self.dim_vo}" if self.dim_vo else f"d{self.dim}"
        parts += [dims] * (dims != "d128")
        is_fp8 = self.kv_dtype.itemsize == 1
        parts += ["e4m3" if self.dtype.itemsize == 1 else "e4m3 KV"] * is_fp8
        parts += ["full"] * self.is_full
        parts += [f"window {self.window_left}"] * (self.window_left >= 0)
        parts += [f"pages of {self.page}"] * (self.page != PAGE)
        parts += ["lengths on the GPU"] * self.on_device
        return " ".join(parts)

    # -- arguments --------------------------------------------------------------------------------

    def decode(self) -> Arguments:
        """Queries, keys and values in pages, and the three tensors of the page table."""
        pages = [-(-n // self.page) for n in self.lengths]
        shape = sum(pages), self.page, self.kv_heads
        q = self._queries()
        indptr = starts(pages, q.device)
        last = [n - (p - 1) * self.page for n, p in zip(self.lengths, pages, strict=True)]
        last_page_len = torch.tensor(last, dtype=torch.int32, device=q.device)
        indices = torch.randperm(sum(pages), device=q.device).int()
        return q, *self._cache(shape), indptr, indices, last_page_len

    def paged(self) -> Arguments:
        """The same, and where the queries of each request start."""
        q, k, v, *table = self.decode()
        return q, k, v, starts(self.queries, q.device), *table

    def ragged(self) -> Arguments:
        """Queries, keys and values of all requests one after the other, and the start of each."""
        q = self._queries()
        bounds = starts(self.queries, q.device), starts(self.lengths, q.device)
        return q, *self._cache((sum(self.lengths), self.kv_heads)), *bounds

    def _queries(self) -> torch.Tensor:
        shape = sum(self.queries), self.qo_heads, self.dim
        q = torch.randn(*shape, device="cuda")
        return (q if self.causal else q * SHARP).to(self.dtype)

    def _cache(self, shape: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.randn(*shape, d, device="cuda").to(self.kv_dtype) for d in self.dims]

    # -- calls ------------------------------------------------------------------------------------

    def run_decode(self, wrapper: Function) -> Function:
        """Runs of a decode wrapper, which plans at the first, as layers of a model share a plan."""
        planned = None

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *table: torch.Tensor) -> Any:
            nonlocal planned
            if planned is None:
                planned = wrapper(workspace(q), "NHD")
                self.plan_decode(planned, *table)
            return planned.run(q, (k, v))

        return call

    def run_paged(self, wrapper: Function) -> Function:
        """The same of a prefill wrapper."""
        planned = None

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *table: torch.Tensor) -> Any:
            nonlocal planned
            if planned is None:
                planned = wrapper(workspace(q), "NHD")
                self.plan_paged(planned, *self._lengths(table))
            return planned.run(q, (k, v))

        return call

    def run_ragged(self, wrapper: Function) -> Function:
        planned = None

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds: torch.Tensor) -> Any:
            nonlocal planned
            if planned is None:
                planned = wrapper(workspace(q), "NHD")
                heads = self.qo_heads, self.kv_heads, self.dim
                planned.plan(*self._lengths(bounds), *heads, **self._options)
            return planned.run(q, k, v)

        return call

    def plan_decode(self, wrapper: Any, *table: torch.Tensor) -> None:
        wrapper.plan(*table, self.qo_heads, self.kv_heads, self.dim, self.page, **self._dtypes)

    def plan_paged(self, wrapper: Any, *table: torch.Tensor, **bounds: int) -> None:
        heads = self.qo_heads, self.kv_heads, self.dim, self.page
        wrapper.plan(*table, *heads, **self._options, **bounds)

    def _lengths(self, table: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return table if self.on_device else on_host(table)

    @property
    def _options(self) -> dict[str, Any]:
        """What a prefill is planned with besides its lengths and heads."""
        options: dict[str, Any] = {"causal": self.causal, **self._dtypes}
        if self.dim_vo:
            options["head_dim_vo"] = self.dim_vo
        if self.window_left >= 0:
            options["window_left"] = self.window_left
        return options

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        dtypes = {"q_data_type": self.dtype, "kv_data_type": self.kv_dtype}
        return dtypes if self.o_dtype is self.dtype else {**dtypes, "o_data_type": self.o_dtype}

    # -- plain PyTorch ----------------------------------------------------------------------------

    def eager_decode(self, q: Any, k: Any, v: Any, indptr: Any, indices: Any, last: Any) -> Any:
        k, v = (_pages(cache, indices, self.o_dtype) for cache in (k, v))
        return self._sdpa(q, k, v)

    def eager_paged(self, q: Any, k: Any, v: Any, bounds: Any, *table: Any) -> Any:
        return self.eager_decode(q, k, v, *table)

    def eager_ragged(self, q: Any, k: Any, v: Any, *bounds: Any) -> Any:
        return self._sdpa(q, k, v)

    def _sdpa(self, q: Any, k: Any, v: Any) -> Any:
        """For requests that all have the same numbers of queries and tokens."""
        q, k, v = (x.to(self.o_dtype) for x in (q, k, v))
        q, k, v = (x.unflatten(0, (len(self.queries), -1)).transpose(1, 2) for x in (q, k, v))
        n, m = self.queries[0], self.lengths[0]
        mask = None
        if self.causal and n != m:  # torch's causal mask is aligned to the top left.
            mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
        out = functional.scaled_dot_product_attention(
            q,
            k[:, :, :m],
            v[:, :, :m],
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=self.qo_heads != self.kv_heads,
        )
        return out.transpose(1, 2).flatten(0, 1)


def on_host(table: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Move lengths to the host; the host does not read the pages, so they stay on the device."""
    return [t if i == 2 else t.cpu() for i, t in enumerate(table)]


def workspace(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=like.device)


def zipf(requests: int = 64, longest: int = 32768, shortest: int = 128) -> list[int]:
    """Lengths like those of a server: few very long ones; the same in every run."""
    lengths = [max(shortest, round(longest / (i + 1) ** 1.1)) for i in range(requests)]
    random.Random(3).shuffle(lengths)
    return lengths


def starts(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    starts = [*itertools.accumulate(counts, initial=0)]
    return torch.tensor(starts, dtype=torch.int32, device=device)


def _pages(cache: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tokens in their order; torch has no indexing of 8-bit floats everywhere."""
    raw = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    return raw[indices.long()].view(cache.dtype).to(dtype).flatten(0, 1)
