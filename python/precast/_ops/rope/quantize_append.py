# SPDX-License-Identifier: Apache-2.0
"""Rotate, quantise to fp8 and append keys and values to a paged KV cache in one pass.

Sources: Su et al., RoFormer, arXiv:2104.09864; Kwon et al., PagedAttention, arXiv:2309.06180;
DeepSeek-V2, arXiv:2405.04434; OCP 8-bit Floating Point Specification 1.0.
"""

from __future__ import annotations

from typing import Any

from precast._base.errors import CacheLayoutError
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._op.validation import (
    check_device_and_dtype,
    check_memory_apart,
)
from precast._ops.paged._cache import (
    LAYOUT_KIND,
    check_call,
    entries_of,
    put,
    split,
    table_slots,
)
from precast._ops.paged._checks import check_caches, check_indptr
from precast._ops.rope._quantize import (
    KINDS,
    NEW,
    PARTS,
    check_parts,
    first_output,
    quantized,
)
from precast._ops.rope._quantize_trace import append_trace
from precast._ops.rope.quantize import rope_quantize_fp8, rope_quantize_fp8_reference
from precast.api_logging import precast_api

_NAME = "rope_quantize_fp8_append_paged_kv_cache"


def rope_quantize_fp8_append_paged_kv_cache_reference(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`rope_quantize_fp8_append_paged_kv_cache` in plain PyTorch on any device, out of place.

    Returns
    -------
    tuple of torch.Tensor
        ``q_rope`` and ``q_nope`` in fp8, and the two caches with the new entries.
    """
    first, second = paged_kv_cache
    dtype = first.dtype
    scales = (quant_scale_q, quant_scale_kv)
    parts = (q_rope, k_rope, q_nope, k_nope)
    q_rope_out, rotated, q_nope_out, rest = rope_quantize_fp8_reference(
        *parts, cos_sin_cache, pos_ids, is_neox, dtype, *scales
    )
    if v is None or k_rope.dim() == 2:
        rows = rest, rotated
    else:
        # torch has no concatenation of fp8.
        keys = torch.cat((rotated.view(torch.uint8), rest.view(torch.uint8)), dim=-1).view(dtype)
        rows = keys, quantized(v, quant_scale_kv, dtype)
    updated = first.clone(), second.clone()
    table = (batch_indices, positions, kv_indices, kv_indptr)
    for cache, new in zip(updated, rows):
        entries = cache if k_rope.dim() == 2 else entries_of(cache, kv_layout == "HND")
        put(entries, new, table_slots(*table, *entries.shape[:2]))
    return (q_rope_out, q_nope_out, *updated)


def _check(export: str, **given: Any) -> None:
    """Check queries and keys, the page table, and that caches share no memory with what is read."""
    check_parts(export, given, (2, 3))
    check_indptr(export, "kv_indptr", given["kv_indptr"])
    q_rope, k_rope, k_nope, v = (given[name] for name in ("q_rope", "k_rope", "k_nope", "v"))
    names, caches = ("paged_kv_cache[0]", "paged_kv_cache[1]"), given["paged_kv_cache"]
    for name, cache in zip(names, caches):
        check_device_and_dtype(export, name, cache, q_rope, given["q_rope_out"].dtype, "q_rope")
    if k_rope.dim() == 2:
        row_names, rows, hnd = ("k_nope", "k_rope"), (k_nope, k_rope), None
    else:
        # Shape alone: a row of keys holds both parts.
        keys = k_rope[..., :1].expand(-1, -1, k_rope.shape[-1] + k_nope.shape[-1])
        row_names, rows, hnd = ("k_rope", "v"), (keys, v), given["kv_layout"] == "HND"
    check_caches(export, names, caches, row_names, rows, hnd)
    entries = caches[0] if hnd is None else entries_of(caches[0], hnd)
    if given["page_size"] <= 0 or given["page_size"] != entries.shape[1]:
        raise ValueError(
            f"{export}: page_size must be positive and {entries.shape[1]} as {names[0]} has, got "
            f"{given['page_size']}"
        )
    for name, cache in zip(names, caches):
        for other in (*PARTS, "v", "q_rope_out", "q_nope_out"):
            check_memory_apart(export, name, cache, given[other], other)


def _write(
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    q_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor,
    enable_pdl: bool,
    quantize_dtype: torch.dtype,
    **given: Any,
) -> None:
    values = rope_quantize_fp8_append_paged_kv_cache_reference(
        paged_kv_cache=paged_kv_cache, **given
    )
    for out, value in zip((q_rope_out, q_nope_out, *paged_kv_cache), values):
        out.copy_(value)


def _q_rope_out(
    export: str,
    quantize_dtype: torch.dtype | None,
    q_rope: torch.Tensor,
    q_rope_out: torch.Tensor | None,
    q_nope_out: torch.Tensor | None,
) -> torch.Tensor:
    return first_output(export, quantize_dtype, q_rope, q_rope_out, None, q_nope_out, None)


def _pair(paged_kv_cache: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return both caches; what is no pair at all fails in the call, and check_call() names it."""
    if isinstance(paged_kv_cache, torch.Tensor):
        raise CacheLayoutError(
            f"{_NAME}: paged_kv_cache must be a tuple of two tensors, got one; pass .unbind(1)"
        )
    return split(paged_kv_cache)


def _value(v: torch.Tensor | None, k_rope: torch.Tensor) -> torch.Tensor:
    """Return the values, or what stands for them in the export where MLA has none."""
    is_mla = k_rope.dim() == 2
    if is_mla and v is not None:
        raise ValueError(f"{_NAME}: v must be None for MLA (keys of 2 dimensions), got a tensor")
    if not is_mla and v is None:
        raise ValueError(f"{_NAME}: v must be a tensor for keys with heads, got None")
    return k_rope[..., :0] if v is None else v


_APPEND = Export(
    "rope_quantize",
    _NAME,
    "q_rope:T[tokens,q_heads,rope_dim] k_rope:T q_nope k_nope v cos_sin_cache:any "
    "pos_ids:i32|i64[tokens] paged_kv_cache! kv_indices:i32|i64[indices] kv_indptr:i32|i64 "
    "batch_indices:i32|i64[tokens] positions:i32|i64[tokens] is_neox:bool "
    "quant_scale_q:float quant_scale_kv:float page_size:int kv_layout q_rope_out!:U "
    "q_nope_out!:tensor enable_pdl:bool",
    write=_write,
    check=_check,
    new={"q_rope_out": _q_rope_out, "q_nope_out": NEW["q_nope_out"]},
    derived={"quantize_dtype": lambda q_rope_out: q_rope_out.dtype},
    kinds={
        **KINDS,
        **LAYOUT_KIND,
        "v": Kind("Tensor {name}", "_value({name}, k_rope)", names={"_value": _value}),
        "paged_kv_cache": Kind(
            "Tensor{w} k_cache, Tensor{w} v_cache",
            "*_pair({name})",
            decode=lambda k_cache, v_cache: (k_cache, v_cache),
            names={"_pair": _pair},
        ),
    },
)


@precast_api(trace=append_trace(_NAME, rope_quantize_fp8_append_paged_kv_cache_reference))
@launches(_APPEND, returns=("q_rope_out", "q_nope_out"), explain=check_call)
@documented(rope_quantize_fp8)
def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rope_quantize_fp8` with keys and values written to the pages of a KV cache; one pass.

    Token ``t`` goes to entry ``positions[t] % page_size`` of page
    ``kv_indices[kv_indptr[b] + positions[t] // page_size]``, ``b = batch_indices[t]``.

    Parameters
    ----------
    v : torch.Tensor, optional
        ``[tokens, v_heads, columns]``; None for MLA, and only then.
    paged_kv_cache : tuple of torch.Tensor
        Keys, the rotated columns before the others, and values: ``[pages, page_size, heads,
        columns]`` or, for HND, ``[pages, heads, page_size, columns]``. For MLA the columns that are
        not rotated, and those that are: ``[pages, page_size, columns]``. In ``quantize_dtype``;
        stride 1 in the last dimension, any in the others; apart from each other and from all other
        tensors in memory.
    kv_indices : torch.Tensor
        ``[pages of all requests]``, int32 or int64, contiguous: pages of the cache.
    kv_indptr : torch.Tensor
        ``[requests + 1]``, likewise: where each request's pages begin; the new tokens included.
    batch_indices, positions : torch.Tensor
        ``[tokens]``, likewise: request of each token, and its place in it. A token with a negative
        one, or without a page, is not written to the cache; its queries are.
    quant_scale_q, quant_scale_kv : float
        What queries, and keys and values, are multiplied by before the cast.
    page_size : int
        Entries of a page.
    kv_layout : str
        ``"NHD"`` or ``"HND"``; no matter for MLA.
    q_rope_out, q_nope_out : torch.Tensor, optional
        Where to write the queries. Default: new tensors.

    Returns
    -------
    tuple of torch.Tensor
        ``q_rope`` and ``q_nope`` in fp8.

    Raises
    ------
    ValueError
        As :func:`rope_quantize_fp8`; also for caches that do not fit, values of MLA, and missing
        values without it.
    precast.errors.CacheLayoutError
        An unknown layout, or a cache that is no tuple of two tensors; a ``KeyError``, too.

    Notes
    -----
    As :func:`rope_quantize_fp8`. Sources: arXiv:2104.09864, arXiv:2309.06180, arXiv:2405.04434.

    Examples
    --------
    >>> import torch, precast
    >>> q, cache = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.0, 1.0]])
    >>> keys, values = (torch.zeros(1, 1, 1, 2).to(torch.float8_e4m3fn) for _ in range(2))
    >>> zero, indptr = torch.tensor([0]), torch.tensor([0, 1])
    >>> with precast.reference_mode():
    ...     out = precast.rope_quantize_fp8_append_paged_kv_cache(
    ...         q, q, None, None, q, cache, zero, (keys, values), zero, indptr, zero, zero,
    ...         page_size=1,
    ...     )
    >>> keys.float(), values.float()
    (tensor([[[[-2.,  1.]]]]), tensor([[[[1., 2.]]]]))
    """
