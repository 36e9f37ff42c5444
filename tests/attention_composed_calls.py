# SPDX-License-Identifier: Apache-2.0
"""Sound calls of the wrappers that consist of others; ``CALLS`` has those of all wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_functional_calls as functional
import attention_sound_calls as plain
import mla_calls as mla
import torch
from attention_arguments import Call
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

SIZES: dict[str, Any] = {
    "num_qo_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "page_size": PAGE_SIZE,
}


WORKSPACES = ("float_workspace_buffer", "int_workspace_buffer")


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(DTYPE)


def q_and_cache(name: str = "paged_kv_cache") -> dict[str, Any]:
    cache = normal(2, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    return {"q": normal(TOKENS, HEADS, HEAD_DIM), name: cache}


# -- cascade --------------------------------------------------------------------------------------


def _cascade_buffers() -> dict[str, Any]:
    """A prefix of one page that both requests share, then a page of each."""
    two = torch.tensor([0, TOKENS], dtype=torch.int32)
    return {
        "qo_indptr_arr": [two, INDPTR.clone()],
        "paged_kv_indptr_arr": [two // 2, INDPTR.clone()],
        "paged_kv_indices_arr": [INDPTR[:1].clone(), INDPTR[:2].clone()],
        "paged_kv_last_page_len": [LENS[1:].clone(), LENS.clone()],
    }


def _cascade(method: str) -> Call:
    kind = precast.MultiLevelCascadeAttentionWrapper
    made = {"num_levels": 2, "float_workspace_buffer": bytes_of()}
    tables = _cascade_buffers()
    if method == "__init__":
        return Call(kind, made)
    if method == "graph":
        names = [*tables][:3]
        buffers = {name.replace("_arr", "_buf_arr"): tables[name] for name in names}
        buffers["paged_kv_last_page_len_buf_arr"] = tables["paged_kv_last_page_len"]
        return Call(kind, {**made, "use_cuda_graph": True, **buffers})
    wrapper = kind(**made)
    plan = {**tables, **SIZES, "q_data_type": DTYPE}
    wrapper.plan(**plan)
    given = {
        "plan": plan,
        "run": q_and_cache(),
        "reset_workspace_buffer": {
            "float_workspace_buffer": bytes_of(),
            "int_workspace_buffers": [bytes_of(), bytes_of()],
        },
    }
    return Call(getattr(wrapper, method), given[method], wrapper)


def _shared_prefix(kind: type[Any], method: str) -> Call:
    if method == "__init__":
        return Call(kind, {"float_workspace_buffer": bytes_of()})
    wrapper = kind(bytes_of())
    table = {"indptr": INDPTR, "indices": INDPTR[:2], "last_page_len": LENS}
    q, cache = q_and_cache().values()
    if kind is precast.BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
        plan = {f"unique_kv_{name}": x for name, x in table.items()} | SIZES
        plan["data_type"] = DTYPE
    else:
        plan = {f"paged_kv_{name}": x for name, x in table.items()} | SIZES
        plan |= {"qo_indptr": INDPTR, "q_data_type": DTYPE}
    wrapper.begin_forward(**plan)
    shared = torch.ones(3, KV_HEADS, HEAD_DIM, dtype=q.dtype)
    given = {
        "begin_forward": plan,
        "forward": {"q": q, "k_shared": shared, "v_shared": shared + 1, "unique_kv_cache": cache},
        "reset_workspace_buffer": {name: bytes_of() for name in WORKSPACES},
    }
    return Call(getattr(wrapper, method), given[method], wrapper)


# -- prefill and decode at once -------------------------------------------------------------------


def _mixed(method: str) -> Call:
    if method == "__init__":
        return Call(precast.BatchAttention, {"device": "cpu"})
    wrapper = precast.BatchAttention(device="cpu")
    plan: dict[str, Any] = {
        "qo_indptr": INDPTR,
        "kv_indptr": INDPTR,
        "kv_indices": INDPTR[:2],
        "kv_len_arr": LENS,
        **SIZES,
        "head_dim_qk": HEAD_DIM,
        "head_dim_vo": HEAD_DIM,
    }
    del plan["head_dim"]
    wrapper.plan(**plan)
    given = {
        "plan": plan,
        "run": {
            **q_and_cache("kv_cache"),
            "out": torch.full((TOKENS, HEADS, HEAD_DIM), 7.0, dtype=DTYPE),
            "lse": torch.full((TOKENS, HEADS), 7.0),
        },
    }
    return Call(getattr(wrapper, method), given[method], wrapper)


def _pod(method: str) -> Call:
    kind = precast.PODWithPagedKVCacheWrapper
    if method == "__init__":
        return Call(kind, {"float_workspace_buffer": bytes_of()})
    if method == "graph":
        made = plain._buffers(precast.BatchDecodeWithPagedKVCacheWrapper)
        return Call(kind, {"float_workspace_buffer": bytes_of(), "use_cuda_graph": True, **made})
    wrapper = kind(bytes_of())
    table = {"indptr": INDPTR, "indices": INDPTR[:2], "last_page_len": LENS}
    plan = {**table, **SIZES, "q_data_type": DTYPE}
    wrapper.plan(**plan)
    q, cache = q_and_cache().values()
    k = normal(5, KV_HEADS, HEAD_DIM)
    given = {
        "plan": plan,
        "run": {"q_p": q, "k_p": k, "v_p": k + 1, "q_d": q + 1, "paged_kv_cache_d": cache},
        "reset_workspace_buffer": {name: bytes_of() for name in WORKSPACES},
    }
    return Call(getattr(wrapper, method), given[method], wrapper)


def _batch_pod(method: str) -> Call:
    kind = precast.BatchPODWithPagedKVCacheWrapper
    if method == "__init__":
        return Call(kind, {"float_workspace_buffer": bytes_of()})
    wrapper = kind(bytes_of())
    table = {
        "qo_indptr": INDPTR,
        "kv_indptr": INDPTR,
        "kv_indices": INDPTR[:2],
        "last_page_len": LENS,
    }
    tables = {f"{name}_{part}": x.clone() for part in "pd" for name, x in table.items()}
    plan = {**tables, **SIZES, "q_data_type": DTYPE}
    wrapper.plan(**plan)
    q, cache = q_and_cache().values()
    run = {"q_p": q, "paged_kv_cache_p": cache, "q_d": q + 1, "paged_kv_cache_d": cache + 1}
    return Call(getattr(wrapper, method), {"plan": plan, "run": run}[method], wrapper)


# -- block-sparse matrices ------------------------------------------------------------------------


def _blocks(method: str) -> Call:
    kind = precast.BlockSparseAttentionWrapper
    if method == "__init__":
        return Call(kind, {"float_workspace_buffer": bytes_of()})
    wrapper = kind(bytes_of())
    plan: dict[str, Any] = {
        "indptr": torch.tensor([0, 1, 3], dtype=torch.int32),
        "indices": torch.tensor([0, 0, 1], dtype=torch.int32),
        "M": TOKENS,
        "N": 16,
        "R": 1,
        "C": 8,
        **SIZES,
        "q_data_type": DTYPE,
        "o_data_type": DTYPE,
    }
    del plan["page_size"]
    wrapper.plan(**plan)
    k = normal(16, KV_HEADS, HEAD_DIM)
    run = {"q": normal(TOKENS, HEADS, HEAD_DIM), "k": k, "v": k + 1}
    outputs = {"out": torch.full_like(run["q"], 7.0), "lse": torch.full((TOKENS, HEADS), 7.0)}
    given = {
        "plan": plan,
        "run": {**run, **outputs},
        "forward": run,
        "reset_workspace_buffer": {name: bytes_of() for name in WORKSPACES},
    }
    return Call(getattr(wrapper, method), given[method], wrapper)


def _variable_blocks(method: str) -> Call:
    kind = precast.VariableBlockSparseAttentionWrapper
    if method == "__init__":
        return Call(kind, {"float_workspace_buffer": bytes_of()})
    wrapper = kind(bytes_of())
    plan: dict[str, Any] = {
        "block_mask_map": torch.tensor([[[True, False], [True, True]]] * KV_HEADS),
        "block_row_sz": torch.tensor([[1, TOKENS - 1]] * KV_HEADS),
        "block_col_sz": torch.tensor([[8, 16]] * KV_HEADS),
        **SIZES,
        "q_data_type": DTYPE,
    }
    del plan["page_size"]
    wrapper.plan(**plan)
    k = normal(KV_HEADS, 24, HEAD_DIM)
    run = {"q": normal(HEADS, TOKENS, HEAD_DIM), "k": k, "v": k + 1}
    outputs = {"out": torch.full_like(run["q"], 7.0), "lse": torch.full((HEADS, TOKENS), 7.0)}
    given = {
        "plan": plan,
        "run": {**run, **outputs},
        "forward": run,
        "reset_workspace_buffer": {name: bytes_of() for name in WORKSPACES},
    }
    return Call(getattr(wrapper, method), given[method], wrapper)


SHARED_PREFIX = (
    precast.BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    precast.BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)

#: By name; each makes a new wrapper.
CALLS: dict[str, Callable[[], Call]] = {
    **plain.CALLS,
    **functional.CALLS,
    **mla.CALLS,
    **{
        f"MultiLevelCascadeAttentionWrapper.{method}": lambda method=method: _cascade(method)
        for method in ("__init__", "graph", "plan", "run", "reset_workspace_buffer")
    },
    **{
        f"{kind.__name__}.{method}": lambda kind=kind, method=method: _shared_prefix(kind, method)
        for kind in SHARED_PREFIX
        for method in ("__init__", "begin_forward", "forward", "reset_workspace_buffer")
    },
    **{
        f"BatchAttention.{method}": lambda method=method: _mixed(method)
        for method in ("__init__", "plan", "run")
    },
    **{
        f"PODWithPagedKVCacheWrapper.{method}": lambda method=method: _pod(method)
        for method in ("__init__", "graph", "plan", "run", "reset_workspace_buffer")
    },
    **{
        f"BatchPODWithPagedKVCacheWrapper.{method}": lambda method=method: _batch_pod(method)
        for method in ("__init__", "plan", "run")
    },
    **{
        f"{kind}.{method}": lambda make=make, method=method: make(method)
        for kind, make in (
            ("BlockSparseAttentionWrapper", _blocks),
            ("VariableBlockSparseAttentionWrapper", _variable_blocks),
        )
        for method in ("__init__", "plan", "run", "forward", "reset_workspace_buffer")
    },
}
