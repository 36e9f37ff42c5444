# SPDX-License-Identifier: Apache-2.0
"""What reference mode refuses before it writes: what the bindings refuse, in their words."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.validation import (
    check_device_and_dtype,
    check_dtype,
    check_elements_apart,
    check_memory_apart,
    check_rank,
    check_same_device,
)
from precast._ops.attention.enums import check_head_dims
from precast._ops.attention.reference import CAUSAL, MULTI_ITEM, ROPE_LLAMA
from precast._ops.paged._cache import Cache, entries_of, halves


def check_lengths(
    export: str,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    batch_size: int,
) -> None:
    """Vectors of int32, as long as the batch."""
    sizes = {
        "qo_indptr": (qo_indptr, batch_size + 1),
        "kv_indptr": (kv_indptr, batch_size + 1),
        "kv_last_page_len": (kv_last_page_len, batch_size),
        "kv_len": (kv_len, batch_size),
    }
    for name, (tensor, size) in sizes.items():
        if tensor is None:
            continue
        check_dtype(export, name, tensor, torch.int32)
        check_same_device(export, name, tensor, kv_indptr, "kv_indptr")
        if tensor.shape != (size,):
            raise ValueError(f"{export}: {name} must have shape [{size}], got {[*tensor.shape]}")


def _check_q(export: str, q: torch.Tensor) -> None:
    check_rank(export, "q", q, 3, 3)
    check_dtype(export, "q", q, torch.float16, torch.bfloat16, torch.float32)


def _check_kv_dtype(export: str, name: str, kv: torch.Tensor, q: torch.Tensor) -> None:
    check_same_device(export, name, kv, q, "q")
    check_dtype(export, name, kv, q.dtype, torch.float8_e4m3fn, torch.float8_e5m2)


def _check_heads(export: str, name: str, q: torch.Tensor, kv: torch.Tensor) -> None:
    heads = kv.shape[-2]
    if heads < 1 or q.shape[1] % heads:
        raise ValueError(
            f"{export}: q must have a multiple of the {heads} heads of {name}, got {q.shape[1]}"
        )


def check_paged(
    q: torch.Tensor,
    cache: Cache,
    hnd: bool,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> None:
    """Queries, caches and the page table."""
    export = "run_paged"
    _check_q(export, q)
    both = not isinstance(cache, tuple)
    parts: tuple[torch.Tensor, ...] = cache if isinstance(cache, tuple) else (cache,)
    for part in parts:
        check_rank(export, "paged_kv_cache", part, 3 + both, 4 + both)
        if both and part.shape[1] != 2:
            raise ValueError(
                f"{export}: paged_kv_cache must hold keys and values in dimension 1 of size 2, "
                f"got shape {[*part.shape]}"
            )
        _check_kv_dtype(export, "paged_kv_cache", part, q)
    k, v = halves(cache)
    keys, values = entries_of(k, hnd), entries_of(v, hnd)
    if keys.shape[:3] != values.shape[:3] or k.dtype != v.dtype:
        raise ValueError(
            f"{export}: paged_kv_cache must hold keys and values of the same pages, heads and "
            f"dtype, got {[*k.shape]} {k.dtype} and {[*v.shape]} {v.dtype}"
        )
    _check_head_dims(export, q, keys, values)
    _check_heads(export, "paged_kv_cache", q, keys)
    batch = kv_indptr.numel() - 1
    check_lengths(export, None, kv_indptr, kv_last_page_len, kv_len, batch)
    check_dtype(export, "kv_indices", kv_indices, torch.int32)
    check_rank(export, "kv_indices", kv_indices, 1, 1)


def _check_head_dims(export: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{export}: keys must have head_dim {q.shape[-1]} as q, got {k.shape[-1]}")
    check_head_dims(export, q.shape[-1], v.shape[-1])


def check_ragged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_indptr: torch.Tensor
) -> None:
    """Queries, keys and values."""
    export = "run_ragged"
    _check_q(export, q)
    for name, tensor in (("k", k), ("v", v)):
        check_rank(export, name, tensor, 3, 3)
        _check_kv_dtype(export, name, tensor, q)
    check_dtype(export, "v", v, k.dtype)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{export}: v must have the tokens and heads of k, got {[*v.shape]} for {[*k.shape]}"
        )
    _check_head_dims(export, q, k, v)
    _check_heads(export, "k", q, k)
    check_lengths(export, None, kv_indptr, None, None, kv_indptr.numel() - 1)


def check_plan(
    export: str, plan_causal: bool, mask_mode: int, plan_window_left: int, window_left: int
) -> None:
    """A plan for some of the tokens serves no run that sees more."""
    if plan_causal and mask_mode not in (CAUSAL, MULTI_ITEM):
        raise ValueError(
            f"{export}: mask_mode must be causal (1) or multi-item (3) as plan() had it, got "
            f"{mask_mode}; plan again with causal=False"
        )
    if plan_window_left >= 0 and not 0 <= window_left <= plan_window_left:
        raise ValueError(
            f"{export}: window_left must be 0 to {plan_window_left} as plan() had it, got "
            f"{window_left}; plan again with the wider window"
        )


def check_rope(export: str, pos_encoding: int, rope_scale: float, rope_theta: float) -> None:
    """What positions are divided by."""
    if pos_encoding == ROPE_LLAMA and not (rope_scale > 0 and rope_theta > 0):
        raise ValueError(
            f"{export}: rope_scale and rope_theta must be positive, got {rope_scale} and "
            f"{rope_theta}"
        )


def check_items(
    export: str,
    mask_mode: int,
    prefix_len: torch.Tensor | None,
    token_pos: torch.Tensor | None,
    token_pos_len: int,
    batch: int,
) -> None:
    """Of multi-item scoring: a prefix and as many places for each request."""
    if mask_mode != MULTI_ITEM:
        return
    for name, tensor, least in (
        ("prefix_len", prefix_len, batch),
        ("token_pos", token_pos, batch * token_pos_len),
    ):
        if tensor is None:
            raise ValueError(f"{export}: multi-item scoring needs {name}, got None")
        if tensor.numel() < least:
            raise ValueError(
                f"{export}: {name} must have at least {least} elements, got shape {[*tensor.shape]}"
            )


def check_outputs(
    export: str,
    q: torch.Tensor,
    head_dim_vo: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    **others: torch.Tensor | None,
) -> None:
    """What is written, and the sinks; ``others`` are read or written, too."""
    for name, tensor, shape, dtype in (
        ("out", out, (*q.shape[:2], head_dim_vo), q.dtype),
        ("lse", lse, tuple(q.shape[:2]), torch.float32),
        ("sinks", sinks, (q.shape[1],), torch.float32),
    ):
        if tensor is None:
            continue
        check_device_and_dtype(export, name, tensor, q, dtype, "q")
        if tensor.shape != shape:
            raise ValueError(f"{export}: {name} must have shape {[*shape]}, got {[*tensor.shape]}")
    for name, tensor in (("out", out), ("lse", lse)):
        if tensor is not None:
            check_elements_apart(export, name, tensor)
            for other_name, other in {"q": q, **others}.items():
                if other is not None:
                    check_memory_apart(export, name, tensor, other, other_name)
    if lse is not None:
        check_memory_apart(export, "lse", lse, out, "out")
