# SPDX-License-Identifier: Apache-2.0
"""RoPE and quantisation to fp8 in one pass, keys and values straight into a paged KV cache.

Sources: Su et al., RoFormer, arXiv:2104.09864; Kwon et al., PagedAttention, arXiv:2309.06180;
DeepSeek-V2, arXiv:2405.04434; OCP 8-bit Floating Point Specification 1.0.
"""

from __future__ import annotations

from typing import Any

from precast._base.errors import CacheLayoutError
from precast._base.torch import torch
from precast._op.export import Export, op
from precast._ops.paged._cache import (
    check_call,
    entries_of,
    is_hnd,
    layout_of,
    put,
    split,
    table_places,
)
from precast._ops.rope._quantize import (
    PARTS,
    new_outputs,
    quantized,
    turned_and_quantized,
    without_columns,
)
from precast._ops.rope._quantize_append_checks import check_append
from precast._ops.rope._quantize_trace import append_trace
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
    """:func:`rope_quantize_fp8_append_paged_kv_cache` in plain PyTorch, out of place.

    Parameters
    ----------
    q_rope, q_nope : torch.Tensor
        ``[tokens, q_heads, columns]``, any device; ``q_nope`` may be None.
    k_rope, k_nope : torch.Tensor
        ``[tokens, k_heads, columns]``, or for MLA ``[tokens, columns]``; ``k_nope`` may be None.
    v : torch.Tensor, optional
        ``[tokens, k_heads, columns]``; None for MLA.
    cos_sin_cache : torch.Tensor
        ``[max_position, rope_dim]``, float32: cosines, then sines.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64.
    paged_kv_cache : tuple of torch.Tensor
        Keys and values, or for MLA the columns that do not turn and those that do, in fp8.
    kv_indices, kv_indptr, batch_indices, positions : torch.Tensor
        Pages of all requests, where each request's begin, and request and place of each token.
    is_neox : bool
        Pairs are halves apart; otherwise neighbours.
    quant_scale_q, quant_scale_kv : float
        Multipliers of queries, and of keys and values.
    page_size : int
        Entries of a page.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.

    Returns
    -------
    tuple of torch.Tensor
        ``q_rope`` and ``q_nope`` in fp8, and the two caches with the new entries.

    Examples
    --------
    >>> import torch
    >>> q, cache = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.0, 1.0]])
    >>> pages = torch.zeros(1, 1, 1, 2).to(torch.float8_e4m3fn)
    >>> zero, indptr = torch.tensor([0]), torch.tensor([0, 1])
    >>> rope_quantize_fp8_append_paged_kv_cache_reference(
    ...     q, q, None, None, q, cache, zero, (pages, pages), zero, indptr, zero, zero, page_size=1
    ... )[2].float()
    tensor([[[[-2.,  1.]]]])
    """
    first, second = paged_kv_cache
    dtype = first.dtype
    q_nope = without_columns(q_rope) if q_nope is None else q_nope
    k_nope = without_columns(k_rope) if k_nope is None else k_nope
    turned = turned_and_quantized(k_rope, pos_ids, cos_sin_cache, is_neox, quant_scale_kv, dtype)
    rest = quantized(k_nope, quant_scale_kv, dtype)
    if v is None or k_rope.dim() == 2:
        rows = rest, turned
    else:
        # torch has no concatenation of fp8.
        keys = torch.cat((turned.view(torch.uint8), rest.view(torch.uint8)), dim=-1).view(dtype)
        rows = keys, quantized(v, quant_scale_kv, dtype)
    hnd = kv_layout == "HND"
    updated = first.clone(), second.clone()
    for cache, new in zip(updated, rows):
        entries = cache if k_rope.dim() == 2 else entries_of(cache, hnd)
        pages, size = entries.shape[:2]
        put(
            entries,
            new,
            table_places(batch_indices, positions, kv_indices, kv_indptr, pages, size),
        )
    return (
        turned_and_quantized(q_rope, pos_ids, cos_sin_cache, is_neox, quant_scale_q, dtype),
        quantized(q_nope, quant_scale_q, dtype),
        *updated,
    )


def _check(
    export: str,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    page_size: int,
    hnd: bool,
    **given: Any,
) -> None:
    check_append(
        export,
        {name: given[name] for name in (*PARTS, "v")},
        given["cos_sin_cache"],
        given["pos_ids"],
        paged_kv_cache,
        {name: given[name] for name in ("kv_indices", "kv_indptr")},
        {name: given[name] for name in ("batch_indices", "positions")},
        page_size,
        hnd,
        {name: given[name] for name in ("q_rope_out", "q_nope_out")},
    )


def _write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor,
    **given: Any,
) -> None:
    others = ("hnd", "enable_pdl", "quantize_dtype")
    arguments = {name: value for name, value in given.items() if name not in others}
    values = rope_quantize_fp8_append_paged_kv_cache_reference(**arguments)
    for out, value in zip((q_rope_out, q_nope_out, k_cache, v_cache), values):
        out.copy_(value)


_APPEND = Export(
    "rope_quantize",
    _NAME,
    "q_rope:T k_rope:tensor q_nope:tensor k_nope:tensor v:tensor cos_sin_cache:tensor "
    "pos_ids:tensor k_cache!:tensor v_cache!:tensor kv_indices:tensor kv_indptr:tensor "
    "batch_indices:tensor positions:tensor is_neox:bool quant_scale_q:float quant_scale_kv:float "
    "page_size:int hnd:bool q_rope_out!:U q_nope_out!:tensor enable_pdl:bool",
    write=_write,
    check=_check,
    derived={
        "paged_kv_cache": lambda k_cache, v_cache: (k_cache, v_cache),
        "kv_layout": layout_of,
        "quantize_dtype": lambda q_rope_out: q_rope_out.dtype,
    },
)


def _pair(paged_kv_cache: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both caches; what is no pair at all fails in the call, and check_call() names it."""
    if isinstance(paged_kv_cache, torch.Tensor):
        raise CacheLayoutError(
            f"{_NAME}: paged_kv_cache must be a tuple of two tensors, got one; pass .unbind(1)"
        )
    return split(paged_kv_cache)


def _value(v: torch.Tensor | None, k_rope: torch.Tensor) -> torch.Tensor:
    """What stands for the values of MLA, which has none, in the export."""
    is_mla = k_rope.dim() == 2
    if is_mla and v is not None:
        raise ValueError(f"{_NAME}: v must be None for MLA (keys of 2 dimensions), got a tensor")
    if not is_mla and v is None:
        raise ValueError(f"{_NAME}: v must be a tensor for keys with heads, got None")
    return without_columns(k_rope) if v is None else v


@precast_api(trace=append_trace(_NAME, rope_quantize_fp8_append_paged_kv_cache_reference))
@op("rope_quantize", explain=check_call)
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
    q_rope, q_nope : torch.Tensor
        ``[tokens, q_heads, rope_dim]`` and ``[tokens, q_heads, no_rope_dim]``, as
        :func:`rope_quantize_fp8` takes them; ``q_nope`` may be None.
    k_rope, k_nope : torch.Tensor
        ``[tokens, k_heads, columns]``, or for MLA ``[tokens, columns]``; ``k_nope`` may be None.
    v : torch.Tensor, optional
        ``[tokens, v_heads, columns]``; None for MLA, and only then.
    cos_sin_cache : torch.Tensor
        ``[max_position, rope_dim]``, float32: cosines, then sines.
    pos_ids : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: the row of the cache by which a token turns.
    paged_kv_cache : tuple of torch.Tensor
        Keys, the columns that turn before the others, and values: ``[pages, page_size, heads,
        columns]`` or, for HND, ``[pages, heads, page_size, columns]``. For MLA the columns that do
        not turn, and those that do: ``[pages, page_size, columns]``. In ``quantize_dtype``; stride
        1 in the last dimension, any in the others; apart from each other and from all other tensors
        in memory. Written in place.
    kv_indices : torch.Tensor
        ``[pages of all requests]``, int32 or int64, contiguous: pages of the cache.
    kv_indptr : torch.Tensor
        ``[requests + 1]``, likewise: where each request's pages begin; the new tokens included.
    batch_indices, positions : torch.Tensor
        ``[tokens]``, likewise: request of each token, and its place in it. A token with a negative
        one, or without a page, is not written to the cache; its queries are.
    is_neox : bool
        True: pairs are half of ``rope_dim`` apart. False: they are neighbours (GPT-J).
    quantize_dtype : torch.dtype, optional
        float8_e4m3fn or float8_e5m2. Default: that of the first output given, or float8_e4m3fn.
    quant_scale_q, quant_scale_kv : float
        What queries, and keys and values, are multiplied by before the cast.
    page_size : int
        Entries of a page.
    kv_layout : str
        ``"NHD"`` or ``"HND"``; no matter for MLA.
    q_rope_out, q_nope_out : torch.Tensor, optional
        Where to write the queries. Default: new tensors.
    enable_pdl : bool
        Programmatic dependent launch; without effect below compute capability 9.0.

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
    hnd = is_hnd(kv_layout)
    k_cache, v_cache = _pair(paged_kv_cache)
    q_nope = without_columns(q_rope) if q_nope is None else q_nope
    k_nope = without_columns(k_rope) if k_nope is None else k_nope
    outputs = new_outputs(
        _NAME, quantize_dtype, q_rope_out=(q_rope_out, q_rope), q_nope_out=(q_nope_out, q_nope)
    )
    _APPEND.launch(
        q_rope,
        k_rope,
        q_nope,
        k_nope,
        _value(v, k_rope),
        cos_sin_cache,
        pos_ids,
        k_cache,
        v_cache,
        kv_indices,
        kv_indptr,
        batch_indices,
        positions,
        is_neox,
        quant_scale_q,
        quant_scale_kv,
        page_size,
        hnd,
        *outputs,
        enable_pdl,
    )
    return outputs
