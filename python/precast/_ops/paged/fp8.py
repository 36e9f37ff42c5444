# SPDX-License-Identifier: Apache-2.0
"""Quantisation to fp8 on the way into a paged KV cache, by slots, with one scale a tensor.

Sources: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, arXiv:2309.06180; OCP 8-bit Floating Point Specification 1.0.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._ops.paged import _checks
from precast._ops.paged._cache import (
    DERIVED,
    Cache,
    check_call,
    copied,
    entries_of,
    halves,
    is_hnd,
    put,
    quantized,
    slot_places,
    split,
)
from precast._ops.paged._trace import SLOTS, kv_trace, mla_trace
from precast.api_logging import precast_api

_KV = "fp8_quantize_append_paged_kv_cache_with_slot_mapping"
_MLA = "fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping"


def fp8_quantize_append_paged_kv_cache_with_slot_mapping_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> Cache:
    """:func:`fp8_quantize_append_paged_kv_cache_with_slot_mapping` in PyTorch, out of place.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``[tokens, heads, head_dim]``, any device.
    slot_mapping : torch.Tensor
        ``[tokens]`` or fewer.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        The cache, which is not changed.
    k_scale, v_scale : float or torch.Tensor
        What keys and values are divided by.
    kv_layout : str
        ``NHD`` or ``HND``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The cache with the quantised rows in it.

    Examples
    --------
    >>> import torch
    >>> rows = torch.full((1, 1, 2), 3.0)
    >>> cache = torch.zeros(1, 2, 1, 1, 2).to(torch.float8_e4m3fn)
    >>> new = fp8_quantize_append_paged_kv_cache_with_slot_mapping_reference(
    ...     rows, rows, torch.tensor([0]), cache, 2.0, 0.001
    ... )
    >>> new.float().flatten()
    tensor([  1.5000,   1.5000, 448.0000, 448.0000])
    """
    cache = copied(paged_kv_cache)
    parts = zip(halves(cache), (append_key, append_value), (k_scale, v_scale))
    for part, rows, scale in parts:
        entries = entries_of(part, kv_layout == "HND")
        places = slot_places(slot_mapping, *entries.shape[:2])
        put(entries, quantized(rows, scale, part.dtype), places)
    return cache


def fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping_reference(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    scale: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping` in PyTorch, out of place.

    Parameters
    ----------
    append_ckv, append_kpe : torch.Tensor
        ``[tokens, head_dim_ckv]`` and ``[tokens, head_dim_kpe]``, any device.
    slot_mapping : torch.Tensor
        ``[tokens]`` or fewer.
    ckv_cache, kpe_cache : torch.Tensor
        ``[pages, page_size, ...]``, not changed.
    scale : float or torch.Tensor
        What both are divided by.

    Returns
    -------
    tuple of torch.Tensor
        Both caches with the quantised rows in them.

    Examples
    --------
    >>> import torch
    >>> rows, cache = torch.full((1, 2), 3.0), torch.zeros(1, 1, 2).to(torch.float8_e4m3fn)
    >>> new = fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping_reference(
    ...     rows, rows, torch.tensor([0]), cache, cache, 2.0
    ... )
    >>> new[0].float()
    tensor([[[1.5000, 1.5000]]])
    """
    caches = ckv_cache.clone(), kpe_cache.clone()
    places = slot_places(slot_mapping, *ckv_cache.shape[:2])
    for cache, rows in zip(caches, (append_ckv, append_kpe)):
        put(cache, quantized(rows, scale, cache.dtype), places)
    return caches


def _check(
    export: str,
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    k_scale_tensor: torch.Tensor | None,
    v_scale_tensor: torch.Tensor | None,
    hnd: bool,
) -> None:
    _checks.check_kv(export, (append_key, append_value), paged_kv_cache, hnd, to_fp8=True)
    _checks.check_slots(export, slot_mapping, append_key, "append_key")
    _checks.check_scale(export, "k_scale", k_scale_tensor, append_key, "append_key")
    _checks.check_scale(export, "v_scale", v_scale_tensor, append_key, "append_key")


def _check_mla(
    export: str,
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    scale_tensor: torch.Tensor | None,
) -> None:
    _checks.check_mla(export, (append_ckv, append_kpe), (ckv_cache, kpe_cache), to_fp8=True)
    _checks.check_slots(export, slot_mapping, append_ckv, "append_ckv")
    _checks.check_scale(export, "scale", scale_tensor, append_ckv, "append_ckv")


_APPEND = Export(
    "page_fp8",
    _KV,
    "append_key:T append_value:tensor slot_mapping:tensor k_cache!:U v_cache!?:tensor "
    "k_scale_tensor?:tensor v_scale_tensor?:tensor k_scale_value:float v_scale_value:float "
    "hnd:bool enable_pdl:pdl",
    reference=fp8_quantize_append_paged_kv_cache_with_slot_mapping_reference,
    check=_check,
    derived={
        **DERIVED,
        "k_scale": lambda k_scale_tensor, k_scale_value: _given(k_scale_tensor, k_scale_value),
        "v_scale": lambda v_scale_tensor, v_scale_value: _given(v_scale_tensor, v_scale_value),
    },
)
_APPEND_MLA = Export(
    "page_fp8",
    _MLA,
    "append_ckv:T append_kpe:tensor slot_mapping:tensor ckv_cache!:U kpe_cache!:tensor "
    "scale_tensor?:tensor scale_value:float enable_pdl:pdl",
    reference=fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping_reference,
    check=_check_mla,
    derived={"scale": lambda scale_tensor, scale_value: _given(scale_tensor, scale_value)},
)

_TRACE = kv_trace(
    _KV,
    "Keys and values, each divided by its scale, into the entries of a paged fp8 cache.",
    fp8_quantize_append_paged_kv_cache_with_slot_mapping_reference,
    SLOTS,
    "float8_e4m3fn",
    ("k_scale", "v_scale"),
)
_MLA_TRACE = mla_trace(
    _MLA,
    "Both parts of MLA entries, divided by a scale, into the entries of a paged fp8 cache.",
    fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping_reference,
    SLOTS,
    "float8_e4m3fn",
    ("scale",),
)


def _given(tensor: torch.Tensor | None, value: float) -> torch.Tensor | float:
    """The scale that a caller gave."""
    return value if tensor is None else tensor


def _scale(scale: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """The tensor of a scale, or its value."""
    return (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, float(scale))


@precast_api(trace=_TRACE)
@op("page_fp8", explain=check_call)
def fp8_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
) -> None:
    r"""Quantise keys and values to fp8 and write them to the slots of a paged KV cache, in place.

    .. math::

        cache_{page, entry, h} = \mathrm{saturate}\left(\mathrm{round}\left(
        append_{i, h} / scale\right)\right)

    with page and entry as in :func:`append_paged_kv_cache_with_slot_mapping`.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``[tokens, heads, head_dim]``, float16 or bfloat16, on a CUDA device; stride 1 in the last
        dimension, any in the others.
    slot_mapping : torch.Tensor
        ``[tokens]``, as :func:`append_paged_kv_cache_with_slot_mapping` takes it.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        As :func:`append_paged_kv_cache` takes it, float8_e4m3fn or float8_e5m2. View a uint8 cache
        as the one that is meant.
    k_scale, v_scale : float or torch.Tensor
        What the cache is to be multiplied by to have the numbers again, positive and finite: keys
        and values are divided by it. A number, or a float32 tensor of one element on the device of
        ``append_key``, which is read when the kernel runs.
    kv_layout : str
        ``NHD`` or ``HND``.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Raises
    ------
    precast.errors.CacheLayoutError, ValueError
        As :func:`append_paged_kv_cache`.

    Notes
    -----
    The quotient is rounded to float32 and then to nearest even; beyond the largest fp8 number, and
    for infinity, it is that number; NaN stays NaN. Where a scale is 0 or not finite, quotients are
    those of IEEE: of an infinite one 0, and NaN for infinity. Slots as in
    :func:`append_paged_kv_cache_with_slot_mapping`. No allocation; safe in CUDA graphs; not
    differentiable. Source: arXiv:2309.06180, OCP 8-bit Floating Point Specification 1.0.

    Examples
    --------
    >>> import torch, precast
    >>> rows = torch.full((1, 1, 2), 3.0, dtype=torch.bfloat16)
    >>> cache = torch.zeros(1, 2, 1, 1, 2).to(torch.float8_e4m3fn)
    >>> with precast.reference_mode():
    ...     precast.fp8_quantize_append_paged_kv_cache_with_slot_mapping(
    ...         rows, rows, torch.tensor([0]), cache, 2.0, 0.001
    ...     )
    >>> cache.float().flatten()
    tensor([  1.5000,   1.5000, 448.0000, 448.0000])
    """
    hnd = is_hnd(kv_layout)
    k_cache, v_cache = split(paged_kv_cache)
    (k_tensor, k_value), (v_tensor, v_value) = _scale(k_scale), _scale(v_scale)
    _APPEND.launch(
        append_key,
        append_value,
        slot_mapping,
        k_cache,
        v_cache,
        k_tensor,
        v_tensor,
        k_value,
        v_value,
        hnd,
        enable_pdl,
    )


@precast_api(trace=_MLA_TRACE)
@op("page_fp8")
def fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    scale: float | torch.Tensor,
    enable_pdl: bool | None = None,
) -> None:
    r"""Quantise both parts of MLA entries to fp8 and write them to their slots, in place.

    .. math::

        cache_{page, entry} = \mathrm{saturate}\left(\mathrm{round}\left(
        append_i / scale\right)\right)

    with page and entry as in :func:`append_paged_kv_cache_with_slot_mapping`, for both caches.

    Parameters
    ----------
    append_ckv, append_kpe : torch.Tensor
        ``[tokens, head_dim_ckv]`` and ``[tokens, head_dim_kpe]``, float16 or bfloat16, on a CUDA
        device; stride 1 in the last dimension.
    slot_mapping : torch.Tensor
        ``[tokens]``, as :func:`append_paged_kv_cache_with_slot_mapping` takes it.
    ckv_cache, kpe_cache : torch.Tensor
        ``[pages, page_size, ...]``, float8_e4m3fn or float8_e5m2; otherwise as
        :func:`append_paged_mla_kv_cache` takes them.
    scale : float or torch.Tensor
        As ``k_scale`` of :func:`fp8_quantize_append_paged_kv_cache_with_slot_mapping`, for both.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Raises
    ------
    ValueError
        As :func:`append_paged_kv_cache`.

    Notes
    -----
    As :func:`fp8_quantize_append_paged_kv_cache_with_slot_mapping`. Source: arXiv:2405.04434.

    Examples
    --------
    >>> import torch, precast
    >>> rows, cache = torch.full((1, 2), 3.0).half(), torch.zeros(1, 1, 4).to(torch.float8_e4m3fn)
    >>> caches = cache[..., :2], cache[..., 2:]
    >>> with precast.reference_mode():
    ...     precast.fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping(
    ...         rows, rows, torch.tensor([0]), *caches, 2.0
    ...     )
    >>> cache.float()
    tensor([[[1.5000, 1.5000, 1.5000, 1.5000]]])
    """
    tensor, value = _scale(scale)
    _APPEND_MLA.launch(
        append_ckv, append_kpe, slot_mapping, ckv_cache, kpe_cache, tensor, value, enable_pdl
    )
