# SPDX-License-Identifier: Apache-2.0
"""Checks of reference mode before it writes: those of the bindings, with the same texts."""

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
from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.plan import PlanShape, ScoreOptions
from precast._ops.attention.validation import check_head_dims, kv_dtypes
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
    check_dtype(export, name, kv, *kv_dtypes(q.dtype))


def check_paged(export: str, q: torch.Tensor, cache: Cache, hnd: bool) -> None:
    """Queries and caches."""
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


def check_pages(
    export: str,
    shape: PlanShape,
    kv_last_page_len: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
) -> None:
    """The page table, if there are pages."""
    if not shape.page_size:
        return
    if kv_last_page_len is None and kv_len is None:
        raise ValueError(f"{export}: pages need kv_last_page_len or kv_len, got neither")
    if kv_indices is None:
        raise ValueError(f"{export}: a paged cache needs kv_indices, got None")
    check_dtype(export, "kv_indices", kv_indices, torch.int32)
    check_rank(export, "kv_indices", kv_indices, 1, 1)


def check_planned(export: str, shape: PlanShape, q: torch.Tensor, keys: torch.Tensor) -> None:
    """Rows and heads are those of the plan."""
    heads, kv_heads = shape.num_qo_heads, shape.num_kv_heads
    for name, tensor, dim, planned, what in (
        ("q", q, 1, heads, "heads"),
        ("q", q, 0, q.shape[0] if shape.rows < 0 else shape.rows, "rows"),
        ("k", keys, -2, kv_heads, "heads"),
        ("paged_kv_cache", keys, 1, shape.page_size or keys.shape[1], "tokens in a page"),
    ):
        if tensor.shape[dim] != planned:
            raise ValueError(
                f"{export}: {name} must have {planned} {what} as in plan(), got shape "
                f"{[*tensor.shape]}"
            )


def _check_head_dims(export: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{export}: keys must have head_dim {q.shape[-1]} as q, got {k.shape[-1]}")
    check_head_dims(export, q.shape[-1], v.shape[-1])


def check_ragged(export: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Queries, keys and values."""
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


def check_scores(export: str, shape: PlanShape, options: ScoreOptions) -> None:
    """A plan for some of the tokens serves no run that sees more; RoPE divides by its options."""
    mode, window, planned = options.mask_mode, options.window_left, shape.window_left
    if shape.causal and mode not in (MaskMode.CAUSAL, MaskMode.MULTIITEMSCORING):
        raise ValueError(
            f"{export}: mask_mode must be causal (1) or multi-item (3) as plan() had it, got "
            f"{mode}; plan again with causal=False"
        )
    if planned >= 0 and not 0 <= window <= planned:
        raise ValueError(
            f"{export}: window_left must be 0 to {planned} as plan() had it, got {window}; plan "
            f"again with the wider window"
        )
    scale, theta = options.rope_scale, options.rope_theta
    if options.pos_encoding == PosEncodingMode.ROPE_LLAMA and not (scale > 0 and theta > 0):
        raise ValueError(
            f"{export}: rope_scale and rope_theta must be positive, got {scale} and {theta}"
        )


def check_items(
    export: str,
    options: ScoreOptions,
    prefix_len: torch.Tensor | None,
    token_pos: torch.Tensor | None,
    batch: int,
) -> None:
    """Multi-item scoring has a prefix and as many places for each request."""
    if options.mask_mode != MaskMode.MULTIITEMSCORING:
        return
    for name, tensor, least in (
        ("prefix_len", prefix_len, batch),
        ("token_pos", token_pos, batch * options.token_pos_len),
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
