# SPDX-License-Identifier: Apache-2.0
"""Quantise to fp8 and append to a paged KV cache by slots, with one scale a tensor.

Sources: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, arXiv:2309.06180; OCP 8-bit Floating Point Specification 1.0.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.paged._append import appends
from precast._ops.paged._cache import Cache, halves, quantized
from precast._ops.paged.append import (
    append_paged_kv_cache_with_slot_mapping,
    append_paged_kv_cache_with_slot_mapping_reference,
    append_paged_mla_kv_cache_with_slot_mapping,
    append_paged_mla_kv_cache_with_slot_mapping_reference,
)


def fp8_quantize_append_paged_kv_cache_with_slot_mapping_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> Cache:
    """:func:`fp8_quantize_append_paged_kv_cache_with_slot_mapping` in PyTorch, out of place."""
    dtype = halves(paged_kv_cache)[0].dtype
    keys, values = quantized(append_key, k_scale, dtype), quantized(append_value, v_scale, dtype)
    return append_paged_kv_cache_with_slot_mapping_reference(
        keys, values, slot_mapping, paged_kv_cache, kv_layout
    )


def fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping_reference(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    scale: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping` in PyTorch, out of place."""
    ckv, kpe = (quantized(rows, scale, ckv_cache.dtype) for rows in (append_ckv, append_kpe))
    return append_paged_mla_kv_cache_with_slot_mapping_reference(
        ckv, kpe, slot_mapping, ckv_cache, kpe_cache
    )


@appends(
    "append_key:T append_value:tensor slot_mapping:tensor k_cache!:U v_cache!?:tensor "
    "k_scale_tensor v_scale_tensor k_scale_value v_scale_value kv_layout enable_pdl:pdl",
    "Keys and values, each divided by its scale, into the entries of a paged fp8 cache.",
)
@documented(append_paged_kv_cache_with_slot_mapping)
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
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        As :func:`append_paged_kv_cache` takes it, float8_e4m3fn or float8_e5m2. View a uint8 cache
        as the one that is meant.
    k_scale, v_scale : float or torch.Tensor
        What the cache is to be multiplied by to have the numbers again, positive and finite: keys
        and values are divided by it. A number, or a float32 tensor of one element on the device of
        ``append_key``, which is read when the kernel runs.

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


@appends(
    "append_ckv:T append_kpe:tensor slot_mapping:tensor ckv_cache!:U kpe_cache!:tensor "
    "scale_tensor scale_value enable_pdl:pdl",
    "Both parts of MLA entries, divided by a scale, into the entries of a paged fp8 cache.",
)
@documented(append_paged_mla_kv_cache_with_slot_mapping)
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
    ckv_cache, kpe_cache : torch.Tensor
        ``[pages, page_size, ...]``, float8_e4m3fn or float8_e5m2; otherwise as
        :func:`append_paged_mla_kv_cache` takes them.
    scale : float or torch.Tensor
        As ``k_scale`` of :func:`fp8_quantize_append_paged_kv_cache_with_slot_mapping`, for both.

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
