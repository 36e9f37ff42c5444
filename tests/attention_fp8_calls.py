# SPDX-License-Identifier: Apache-2.0
"""Sound calls whose queries, keys and values are e4m3, with requests that Hopper's kernels take.

A device of compute capability 9.0 is assumed: see :func:`pretend_hopper`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_arguments import SCALES_OF_HEADS, Call
from attention_sound_calls import HEAD_DIM, HEADS, INDPTR, KV_HEADS, PAGE_SIZE, bytes_of

import precast
from precast._ops.attention import sm90

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
#: Queries of a request: with two heads that share keys, more packed rows than half a tile has.
QUERIES, REQUESTS = 40, 2
BOUNDS = QUERIES * INDPTR
TOKENS = 48
LAST = torch.full((REQUESTS,), PAGE_SIZE, dtype=torch.int32)
PAGES = TOKENS // PAGE_SIZE


def pretend_hopper(patch: pytest.MonkeyPatch) -> None:
    """Let every device count as one of compute capability 9.0."""
    patch.setattr(sm90, "is_hopper", lambda device: True)


def _numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(E4M3)


def _scales(has_heads: bool) -> dict[str, torch.Tensor]:
    """One number on the device for all heads, or one for each head."""
    heads = {"q_scale": HEADS, "k_scale": KV_HEADS, "v_scale": KV_HEADS}
    return {name: torch.full((n if has_heads else 1,), 0.5) for name, n in heads.items()}


def _batch(kind: type[Any], has_heads: bool) -> Call:
    wrapper = kind(bytes_of(1 << 20))
    options = {"q_data_type": E4M3, "kv_data_type": E4M3, "o_data_type": BF16}
    sizes = HEADS, KV_HEADS, HEAD_DIM
    given: dict[str, Any] = {"q": _numbers(REQUESTS * QUERIES, HEADS, HEAD_DIM)}
    if kind is precast.BatchPrefillWithRaggedKVCacheWrapper:
        wrapper.plan(BOUNDS, TOKENS * INDPTR, *sizes, **options)
        k = _numbers(REQUESTS * TOKENS, KV_HEADS, HEAD_DIM)
        given |= {"k": k, "v": k.clone()}
    else:
        pages = torch.arange(REQUESTS * PAGES, dtype=torch.int32)
        wrapper.plan(BOUNDS, PAGES * INDPTR, pages, LAST, *sizes, PAGE_SIZE, **options)
        cache = _numbers(REQUESTS * PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        given["paged_kv_cache"] = (cache[:, 0].clone(), cache[:, 1].clone()) if has_heads else cache
    assert wrapper._plan.multiplies_fp8
    given |= _scales(has_heads)
    given["out"] = torch.full(given["q"].shape, 7.0, dtype=BF16)
    given["lse"] = torch.full(given["q"].shape[:2], 7.0)
    return Call(wrapper.run, {**given, "return_lse": True}, wrapper)


def _single(has_heads: bool) -> Call:
    k = _numbers(TOKENS, KV_HEADS, HEAD_DIM)
    given = {"q": _numbers(QUERIES, HEADS, HEAD_DIM), "k": k, "v": k.clone(), "o_dtype": BF16}
    scales = {name.replace("_scale", ""): x for name, x in _scales(has_heads).items()}
    given |= {f"scale_{name}": x for name, x in scales.items()}
    numbers = tuple((f"scale_{name}", 1.5) for name in scales)
    legal = (*numbers, ("scale_q", SCALES_OF_HEADS))
    return Call(precast.single_prefill_with_kv_cache, given, legal=legal)


def _context() -> Call:
    given = {
        "query": _numbers(REQUESTS * QUERIES, HEADS, HEAD_DIM),
        "kv_cache": _numbers(REQUESTS * PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM),
        "workspace_buffer": bytes_of(1 << 22),
        "block_tables": torch.arange(REQUESTS * PAGES, dtype=torch.int32).view(REQUESTS, PAGES),
        "seq_lens": torch.full((REQUESTS,), TOKENS, dtype=torch.int32),
        "max_q_len": QUERIES,
        "max_kv_len": TOKENS,
        "batch_size": REQUESTS,
        "bmm1_scale": 0.125,
        "bmm2_scale": 1.0,
        "cum_seq_lens_q": BOUNDS,
        "cum_seq_lens_kv": TOKENS * INDPTR,
        "kv_layout": "NHD",
        "out": torch.full((REQUESTS * QUERIES, HEADS, HEAD_DIM), 7.0, dtype=BF16),
    }
    return Call(precast.trtllm_batch_context_with_kv_cache, given, has_scratch=True)


_WRAPPERS = (
    precast.BatchPrefillWithPagedKVCacheWrapper,
    precast.BatchPrefillWithRaggedKVCacheWrapper,
)
#: By name, with the kernel that each of them runs.
FP8_CALLS: dict[str, tuple[str, Callable[[], Call]]] = {
    **{
        f"{kind.__name__}.run{'_with_scales_of_heads' * has_heads}": (
            "run_ragged_sm90_fp8" if "Ragged" in kind.__name__ else "run_paged_sm90_fp8",
            lambda kind=kind, has_heads=has_heads: _batch(kind, has_heads),
        )
        for kind in _WRAPPERS
        for has_heads in (False, True)
    },
    **{
        f"single_prefill_with_kv_cache{'_with_scales_of_heads' * has_heads}": (
            "single_prefill_with_kv_cache_fp8",
            lambda has_heads=has_heads: _single(has_heads),
        )
        for has_heads in (False, True)
    },
    "trtllm_batch_context_with_kv_cache": ("trtllm_batch_context_with_kv_cache_fp8", _context),
}
