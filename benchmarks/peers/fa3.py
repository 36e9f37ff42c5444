# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 (PyPI ``fa3-fwd``), behind the methods of wrappers.

This package has no paged cache. So decode reads the pages in memory order, as if each request had
contiguous tokens: the results differ, and the time is the same or less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "fa3_fwd"


class Decode:
    """For requests with the same number of tokens, in full pages."""

    def __init__(self, workspace: Any, kv_layout: str) -> None:
        self.lengths: Any = None

    def plan(self, indptr: Any, indices: Any, last_page_len: Any, *sizes: int, **_: Any) -> None:
        page_size = sizes[-1]
        tokens = (indptr.diff() - 1) * page_size + last_page_len
        if not (tokens == tokens[0]).all() or not (last_page_len == page_size).all():
            raise ValueError("no dense cache has these lengths")
        self.lengths = tokens.int()

    def run(self, q: Any, cache: Any) -> Any:
        from fa3_fwd_interface import flash_attn_with_kvcache

        k, v = (part.view(q.shape[0], -1, *part.shape[2:]) for part in cache)
        return flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=self.lengths)


class Ragged:
    def __init__(self, workspace: Any, kv_layout: str) -> None:
        self.bounds: Any = None

    def plan(self, qo_indptr: Any, kv_indptr: Any, *sizes: int, causal: bool, **more: Any) -> None:
        if more.get("window_left", -1) >= 0:
            raise ValueError("this build has no kernels with a window")
        longest = [int(bounds.diff().max()) for bounds in (qo_indptr, kv_indptr)]
        self.bounds = (qo_indptr.cuda(), kv_indptr.cuda(), *longest)
        self.causal = causal

    def run(self, q: Any, k: Any, v: Any) -> Any:
        from fa3_fwd_interface import flash_attn_varlen_func

        return flash_attn_varlen_func(q, k, v, *self.bounds, causal=self.causal)


WRAPPERS = {
    "BatchDecodeWithPagedKVCacheWrapper": Decode,
    "BatchPrefillWithRaggedKVCacheWrapper": Ragged,
}


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    if family not in ("attention", "attention_sm90") or case.op not in WRAPPERS:
        return None
    return case.bind(WRAPPERS[case.op])
