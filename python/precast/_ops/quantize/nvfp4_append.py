# SPDX-License-Identifier: Apache-2.0
"""Quantise to NVFP4 and append to a paged KV cache by a page table or by slots.

Sources: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149; Kwon et al.,
Efficient Memory Management for Large Language Model Serving with PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.paged._append import appends
from precast._ops.paged._cache import Cache, copied, entries_of, halves, put, table_slots
from precast._ops.paged.append import (
    append_paged_kv_cache,
    append_paged_kv_cache_with_slot_mapping,
)
from precast._ops.quantize._reference_nvfp4 import nvfp4_quantized


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> tuple[torch.Tensor, ...]:
    """:func:`nvfp4_quantize_append_paged_kv_cache_with_slot_mapping` in PyTorch, out of place."""
    cache, factors = copied(paged_kv_cache), copied(kv_cache_sf)
    calls = zip((append_key, append_value), (k_scale, v_scale), halves(cache), halves(factors))
    for rows, scale, codes, scales in calls:
        for part, made in zip((codes, scales), nvfp4_quantized(rows, scale)):
            put(entries_of(part, kv_layout == "HND").view(torch.uint8), made, slot_mapping)
    parts = [c if isinstance(c, tuple) else (c,) for c in (cache, factors)]
    return *parts[0], *parts[1]


def nvfp4_quantize_append_paged_kv_cache_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> tuple[torch.Tensor, ...]:
    """:func:`nvfp4_quantize_append_paged_kv_cache` in PyTorch, out of place."""
    pages, page_size = entries_of(halves(paged_kv_cache)[0], kv_layout == "HND").shape[:2]
    slots = table_slots(batch_indices, positions, kv_indices, kv_indptr, pages, page_size)
    return nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_reference(
        append_key, append_value, slots, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout
    )


@appends(
    "append_key:T append_value:tensor batch_indices:tensor positions:tensor k_cache!:tensor "
    "v_cache!?:tensor k_sf!:tensor v_sf!?:tensor kv_indices:tensor kv_indptr:tensor "
    "kv_last_page_len:tensor k_scale_tensor v_scale_tensor k_scale_value v_scale_value kv_layout "
    "enable_pdl:pdl",
    "Keys and values in NVFP4 into the entries of a paged cache that a page table gives them.",
)
@documented(append_paged_kv_cache)
def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
) -> None:
    r"""Quantise keys and values to NVFP4 and append them to a paged KV cache, in place.

    .. math::

        s_{page, entry, h} = \mathrm{e4m3}\left(\frac{1}{g} \cdot (\max|append_{i, h}| \cdot
        \tfrac{1}{6})\right), \quad
        cache_{page, entry, h} = \mathrm{e2m1}\left(append_{i, h} \cdot \frac{1}{s \cdot g}\right)

    for each block of 16 numbers of a head, with page and entry as in
    :func:`append_paged_kv_cache`.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``[tokens, heads, head_dim]``, float16 or bfloat16, on a CUDA device; ``head_dim`` is a
        multiple of 16, that of values may be another one where the caches are tuples; stride 1 in
        the last dimension, any in the others.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        ``[pages, 2, page_size, heads, head_dim // 2]`` in layout ``NHD``,
        ``[pages, 2, heads, page_size, head_dim // 2]`` in ``HND``; uint8, keys first. Or a tuple of
        a tensor of keys and one of values, without the dimension of 2. Page size 1 may be left out
        of the shape. The first number of a byte is in the lower 4 bits. Stride 1 in the last
        dimension, any in the others; addresses and strides that are multiples of 8 are fastest.
    kv_cache_sf : torch.Tensor or tuple of torch.Tensor
        ``s``, a scale for each 16 numbers: the same with ``head_dim // 16`` as the last dimension,
        float8_e4m3fn or its bytes as uint8. It may lie beside the cache in one buffer.
    k_scale, v_scale : float or torch.Tensor
        ``g``: what dequantisation multiplies by, positive and finite, usually the largest magnitude
        by ``448 * 6``. A number, or a float32 tensor of one element on the device of
        ``append_key``, which is read when the kernel runs.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above; a
        number as scale that is not positive and finite; a cache that overlaps itself, the other
        one or what is appended.

    Notes
    -----
    Numbers are those of :func:`nvfp4_kv_quantize`, bit for bit, and
    :func:`nvfp4_kv_dequantize_paged` restores them. FlashInfer divides by ``6 * g``, so a number
    that lies on a tie may differ from its by one step; NaN becomes 6 here and 0 there. Tokens
    without a place as in :func:`append_paged_kv_cache`. A scale on the GPU is not checked, because
    this would wait for it: one that is not positive and finite gives what the formula gives, and
    NaN gives scales that are NaN. No allocation; safe in CUDA graphs; not differentiable. Source:
    arXiv:2509.25149, arXiv:2309.06180.

    Examples
    --------
    >>> import torch, precast
    >>> rows, one = torch.full((1, 1, 16), 3.0).half(), torch.tensor([1])
    >>> cache = torch.zeros(1, 2, 2, 1, 8, dtype=torch.uint8)
    >>> scales = torch.zeros(1, 2, 2, 1, 1).to(torch.float8_e4m3fn)
    >>> table = torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([2])
    >>> with precast.reference_mode():
    ...     precast.nvfp4_quantize_append_paged_kv_cache(
    ...         rows, rows, one - 1, one, cache, scales, *table, 0.5, 0.25
    ...     )
    >>> cache[0, 0, 1, 0, 0].item(), scales[0, :, 1].flatten().tolist()
    (119, [1.0, 2.0])
    """


@appends(
    "append_key:T append_value:tensor slot_mapping:tensor k_cache!:tensor v_cache!?:tensor "
    "k_sf!:tensor v_sf!?:tensor k_scale_tensor v_scale_tensor k_scale_value v_scale_value "
    "kv_layout enable_pdl:pdl",
    "Keys and values in NVFP4 into the entries of a paged cache that their slots name.",
)
@documented(nvfp4_quantize_append_paged_kv_cache, append_paged_kv_cache_with_slot_mapping)
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
) -> None:
    r"""Quantise keys and values to NVFP4 and write them to the slots of a paged cache, in place.

    .. math::

        s_{page, entry, h} = \mathrm{e4m3}\left(\frac{1}{g} \cdot (\max|append_{i, h}| \cdot
        \tfrac{1}{6})\right), \quad
        cache_{page, entry, h} = \mathrm{e2m1}\left(append_{i, h} \cdot \frac{1}{s \cdot g}\right)

    for each block of 16 numbers of a head, with page and entry as in
    :func:`append_paged_kv_cache_with_slot_mapping`.

    Notes
    -----
    As :func:`nvfp4_quantize_append_paged_kv_cache`, with slots as in
    :func:`append_paged_kv_cache_with_slot_mapping`. FlashInfer's function stops the GPU for a scale
    that is not positive and finite, and copies scales to the host outside of CUDA graphs; this one
    does neither. No allocation; safe in CUDA graphs; not differentiable. Source: arXiv:2509.25149,
    arXiv:2309.06180.

    Examples
    --------
    >>> import torch, precast
    >>> rows = torch.full((1, 1, 16), -6.0).half()
    >>> cache = torch.zeros(1, 2, 1, 1, 8, dtype=torch.uint8)
    >>> scales = torch.zeros(1, 2, 1, 1, 1).to(torch.float8_e4m3fn)
    >>> with precast.reference_mode():
    ...     precast.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    ...         rows, rows, torch.tensor([0]), cache, scales, 1.0, 2.0
    ...     )
    >>> cache[0, 1, 0, 0, 0].item(), scales.flatten().tolist()
    (255, [1.0, 0.5])
    """
