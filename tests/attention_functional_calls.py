# SPDX-License-Identifier: Apache-2.0
"""Sound calls of the functions that plan and run in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from attention_arguments import TWO, Call
from attention_sound_calls import (
    DTYPE,
    HEAD_DIM,
    HEADS,
    INDPTR,
    KV_HEADS,
    LENS,
    PAGE_SIZE,
    TOKENS,
    bytes_of,
)

import precast


def _call(name: str, layout: str = "") -> Call:
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(DTYPE)

    function = getattr(precast, name)
    q, lens, table = normal(2 * TOKENS, HEADS, HEAD_DIM), LENS.clone(), torch.tensor([[1], [0]])
    k = normal(2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    out = torch.full_like(q, 7.0)
    given: dict[str, Any] = {
        "workspace_buffer": bytes_of(1 << 18),
        "sinks": torch.zeros(HEADS),
        "seq_lens": lens,
        "kv_layout": "NHD",
    }
    if name == "xqa":
        shape = (TOKENS, 1, 2, HEADS, HEAD_DIM)
        given |= {"q": q.view(shape), "k_cache": k, "v_cache": k + 1, "page_table": table.int()}
        given |= {"output": out.view(shape), "semaphores": bytes_of(64), "q_seq_len": 2}
        given |= {"num_kv_heads": KV_HEADS, "page_size": PAGE_SIZE, "mask": _draft_mask()}
        given["sinks"] = torch.zeros(KV_HEADS, HEADS // KV_HEADS)
        return Call(function, given, has_scratch=True)
    given |= {"query": q, "kv_cache": torch.stack((k, k + 1), 1), "out": out}
    given |= {"block_tables": table.int()}
    lengths = {"max_q_len": 2, "max_kv_len": 8, "batch_size": TOKENS, "bmm1_scale": 0.125}
    lengths |= {"cum_seq_lens_q": 2 * INDPTR, "cum_seq_lens_kv": 4 * INDPTR, "bmm2_scale": 1.0}
    if "decode" in name:
        given |= {"max_seq_len": 8, "q_len_per_req": 2, "mask": _draft_mask()}
    if "context" in name:
        given |= lengths
    if layout:
        rows = normal(8, KV_HEADS, HEAD_DIM)
        qkv = {"Q_PAGED_KV_NHD": (q, given["kv_cache"]), "SEPARATE_Q_K_V": (q, rows, rows + 1)}
        for key in ("query", "kv_cache", "kv_layout"):
            del given[key]
        given |= {**lengths, "qkv": qkv[layout], "input_layout": layout}
    if "lse" in inspect.signature(function).parameters:
        given["lse"] = torch.full(q.shape[:2], 7.0)
    return Call(function, given, legal=(("o_scale", TWO),), has_scratch=True)


def _draft_mask() -> torch.Tensor:
    return torch.tensor([[1, 0], [3, 0]], dtype=torch.uint16).expand(TOKENS, 2, 2).clone()


#: Functions that plan and run in one call.
FUNCTIONAL = (
    "xqa_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "xqa",
)
CALLS: dict[str, Callable[[], Call]] = {
    **{name: lambda name=name: _call(name) for name in FUNCTIONAL},
    **{
        f"trtllm_fmha_v2_prefill.{layout}": lambda layout=layout: _call(
            "trtllm_fmha_v2_prefill", layout
        )
        for layout in ("Q_PAGED_KV_NHD", "SEPARATE_Q_K_V")
    },
}
