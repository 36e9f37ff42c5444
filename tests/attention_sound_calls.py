# SPDX-License-Identifier: Apache-2.0
"""Sound calls of every method of the attention wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from attention_arguments import Call

import precast

DTYPE = torch.bfloat16
TOKENS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 2, 4, 2, 64, 8
INDPTR = torch.arange(3, dtype=torch.int32)
LENS = torch.tensor([3, 8], dtype=torch.int32)


def bytes_of(size: int = 1 << 17) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def _planned(kind: type[Any], **options: Any) -> Any:
    wrapper = kind(bytes_of(), **options)
    wrapper.plan(**_plan_arguments(kind))
    return wrapper


def _plan_arguments(kind: type[Any]) -> dict[str, Any]:
    sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "q_data_type": DTYPE}
    if kind is precast.BatchPrefillWithRaggedKVCacheWrapper:
        return {"qo_indptr": INDPTR, "kv_indptr": INDPTR, "head_dim_qk": HEAD_DIM, **sizes}
    sizes["page_size"] = PAGE_SIZE
    if kind is precast.BatchPrefillWithPagedKVCacheWrapper:
        pages = {
            "paged_kv_indptr": INDPTR,
            "paged_kv_indices": INDPTR[:2],
            "paged_kv_last_page_len": LENS,
        }
        return {"qo_indptr": INDPTR, **pages, "head_dim_qk": HEAD_DIM, **sizes}
    pages = {"indptr": INDPTR, "indices": INDPTR[:2], "last_page_len": LENS}
    return {**pages, "head_dim": HEAD_DIM, **sizes}


def _run_arguments(kind: type[Any]) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(DTYPE)

    q = normal(TOKENS, HEADS, HEAD_DIM)
    if kind is precast.BatchPrefillWithRaggedKVCacheWrapper:
        k = normal(2, KV_HEADS, HEAD_DIM)
        return {"q": q, "k": k, "v": k + 1}
    return {"q": q, "paged_kv_cache": normal(2, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)}


def _buffers(kind: type[Any]) -> dict[str, Any]:
    """What ``__init__`` takes for CUDA graphs."""
    tables = [INDPTR.clone(), INDPTR[:2].clone(), LENS.clone()]
    if kind is precast.BatchDecodeWithPagedKVCacheWrapper:
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer")
        return dict(zip((*names, "paged_kv_last_page_len_buffer"), tables))
    masks = {"custom_mask_buf": bytes_of(64), "mask_indptr_buf": INDPTR.clone()}
    if kind is precast.BatchPrefillWithRaggedKVCacheWrapper:
        return {"qo_indptr_buf": INDPTR.clone(), "kv_indptr_buf": tables[0], **masks}
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    return {"qo_indptr_buf": INDPTR.clone(), **dict(zip(names, tables)), **masks}


WRAPPERS = (
    precast.BatchDecodeWithPagedKVCacheWrapper,
    precast.BatchPrefillWithPagedKVCacheWrapper,
    precast.BatchPrefillWithRaggedKVCacheWrapper,
)
METHODS = (
    "plan",
    "run",
    "run_return_lse",
    "forward",
    "forward_return_lse",
    "reset_workspace_buffer",
)


def _call_of(kind: type[Any], method: str) -> Call:
    if method == "__init__":
        return Call(kind, {"float_workspace_buffer": bytes_of()})
    if method == "graph":
        graph = {"float_workspace_buffer": bytes_of(), "use_cuda_graph": True}
        return Call(kind, {**graph, **_buffers(kind)})
    wrapper = _planned(kind)
    if method in ("plan", "workspace_size"):
        return Call(getattr(wrapper, method), _plan_arguments(kind), wrapper)
    if method == "reset_workspace_buffer":
        given = {"float_workspace_buffer": bytes_of(), "int_workspace_buffer": bytes_of()}
        return Call(wrapper.reset_workspace_buffer, given, wrapper)
    given = _run_arguments(kind)
    if method.startswith("run"):
        given["out"] = torch.full((TOKENS, HEADS, HEAD_DIM), 7.0, dtype=DTYPE)
        given["lse"] = torch.full((TOKENS, HEADS), 7.0)
    if "sinks" in inspect.signature(getattr(kind, method)).parameters:
        given["sinks"] = torch.zeros(HEADS)
    return Call(getattr(wrapper, method), given, wrapper)


def _graph_wrapper() -> Call:
    given = {
        "workspace_buffer": bytes_of(),
        "indptr_buffer": INDPTR.clone(),
        "indices_buffer": INDPTR[:2].clone(),
        "last_page_len_buffer": LENS.clone(),
    }
    return Call(precast.CUDAGraphBatchDecodeWithPagedKVCacheWrapper, given)


def _fast_plan() -> Call:
    wrapper = _planned(WRAPPERS[0])
    given = {"self": wrapper, **_plan_arguments(WRAPPERS[0])}
    return Call(precast.fast_decode_plan, given, wrapper)


def _single(name: str) -> Call:
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(n, HEAD_DIM, generator=g).to(DTYPE) for n in (HEADS, 5 * KV_HEADS))
    k = k.view(5, KV_HEADS, HEAD_DIM)
    q = q if "decode" in name else q.unsqueeze(0)
    return Call(getattr(precast, name), {"q": q, "k": k, "v": k + 1})


#: By name; each makes a new wrapper.
CALLS: dict[str, Callable[[], Call]] = {
    **{
        f"{kind.__name__}.{method}": lambda kind=kind, method=method: _call_of(kind, method)
        for kind in WRAPPERS
        for method in ("__init__", "graph", *METHODS, "workspace_size")
        if hasattr(kind, method) or method == "graph"
    },
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": _graph_wrapper,
    "fast_decode_plan": _fast_plan,
    **{
        name: lambda name=name: _single(name)
        for name in ("single_decode_with_kv_cache", "single_prefill_with_kv_cache")
    },
}
