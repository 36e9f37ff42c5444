# SPDX-License-Identifier: Apache-2.0
"""Sound calls of the wrapper of MLA and of its functions, in 16 bits and with caches of 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attention_arguments import Call
from attention_sound_calls import INDPTR, LENS, bytes_of

import precast
from precast.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

HEADS, CKV, KPE, PAGE_SIZE, TOKENS = 2, 512, 64, 4, 2
DTYPE = torch.bfloat16
KIND = "BatchMLAPagedAttentionWrapper"
FUNCTIONS = ("trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla")


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DTYPE)


def _tables() -> dict[str, Any]:
    return {
        "qo_indptr": INDPTR.clone(),
        "kv_indptr": INDPTR.clone(),
        "kv_indices": INDPTR[:2].flip(0).clone(),
        "kv_len_arr": LENS.clone(),
    }


def _plan(**more: Any) -> dict[str, Any]:
    return {
        "num_heads": HEADS,
        "head_dim_ckv": CKV,
        "head_dim_kpe": KPE,
        "page_size": PAGE_SIZE,
        "causal": True,
        "sm_scale": 0.07,
        "q_data_type": DTYPE,
        "kv_data_type": DTYPE,
        **more,
    }


def _wrapper(method: str) -> Call:
    made = {"float_workspace_buffer": bytes_of()}
    if method == "__init__":
        return Call(BatchMLAPagedAttentionWrapper, made)
    if method == "graph":
        return Call(BatchMLAPagedAttentionWrapper, {**made, "use_cuda_graph": True, **_tables()})
    wrapper = BatchMLAPagedAttentionWrapper(**made)
    plan = {**_tables(), **_plan()}
    if method == "plan_table":
        table = INDPTR[:2].flip(0)[:, None].clone()
        bounds = {"cum_seq_lens_q": INDPTR.clone(), "seq_lens": LENS.clone()}
        plan = {**bounds, "block_tables": table, "max_q_len": 1, **_plan()}
    if method == "plan_metadata":
        plan = _plan(metadata=MLAPlanMetadata.csr(**_tables()))
    if method == "run_fp8":
        plan |= {"kv_data_type": torch.float8_e4m3fn, "use_sinks": True}
    wrapper.plan(**plan)
    if method.startswith("plan"):
        return Call(wrapper.plan, plan, wrapper)
    if method == "reset_workspace_buffer":
        names = ("float_workspace_buffer", "int_workspace_buffer")
        given: dict[str, Any] = {name: bytes_of() for name in names}
        return Call(wrapper.reset_workspace_buffer, given, wrapper)
    q, cache = _normal(TOKENS, HEADS, CKV + KPE), _normal(2, PAGE_SIZE, CKV + KPE)
    out = torch.full((TOKENS, HEADS, CKV), 7.0, dtype=DTYPE)
    run = {
        "q_nope": q[..., :CKV].contiguous(),
        "q_pe": q[..., CKV:].contiguous(),
        "ckv_cache": cache[..., :CKV].contiguous(),
        "kpe_cache": cache[..., CKV:].contiguous(),
        "out": out,
        "lse": torch.full(out.shape[:2], 7.0),
        "return_lse": True,
    }
    if method == "run_fp8":
        for name in ("ckv_cache", "kpe_cache"):
            run[name] = run[name].to(torch.float8_e4m3fn)
        run |= {"ckv_scale": 0.5, "kpe_scale": 0.25, "sinks": torch.zeros(HEADS)}
    return Call(wrapper.run, run, wrapper)


def _function(name: str) -> Call:
    q = _normal(TOKENS, 2, HEADS, CKV + KPE)
    given: dict[str, Any] = {
        "query": q,
        "kv_cache": _normal(2, PAGE_SIZE, CKV + KPE),
        "workspace_buffer": bytes_of(1 << 18),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": CKV,
        "qk_rope_head_dim": KPE,
        "block_tables": torch.tensor([[1], [0]], dtype=torch.int32),
        "seq_lens": LENS.clone(),
        "max_seq_len": 8,
        "out": torch.full((*q.shape[:-1], CKV), 7.0, dtype=DTYPE),
        "bmm1_scale": 0.07,
        "sinks": torch.zeros(HEADS),
    }
    if "trtllm" in name:
        given |= {"lse": torch.full((TOKENS * 2, HEADS), 7.0), "return_lse": True}
    return Call(getattr(precast, name), given, has_scratch=True)


#: Calls that modules for caches of 16 bits do not take.
FP8_CALLS: dict[str, Callable[[], Call]] = {f"{KIND}.run_fp8": lambda: _wrapper("run_fp8")}

#: By name; each makes a new wrapper.
CALLS: dict[str, Callable[[], Call]] = {
    **{
        f"{KIND}.{method}": lambda method=method: _wrapper(method)
        for method in (
            *("__init__", "graph", "plan", "plan_table", "plan_metadata", "run"),
            "reset_workspace_buffer",
        )
    },
    **{name: lambda name=name: _function(name) for name in FUNCTIONS},
}
