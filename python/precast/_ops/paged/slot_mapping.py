# SPDX-License-Identifier: Apache-2.0
"""Append to a paged KV cache by slots, which serving engines keep for each token.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.paged._append import appends
from precast._ops.paged._cache import Cache, copied, entries_of, halves, put, slot_places
from precast._ops.paged.append import append_paged_kv_cache, append_paged_mla_kv_cache


def append_paged_kv_cache_with_slot_mapping_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_layout: str = "NHD",
) -> Cache:
    """:func:`append_paged_kv_cache_with_slot_mapping` in plain PyTorch, out of place.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The cache with the rows in it.
    """
    cache = copied(paged_kv_cache)
    for part, rows in zip(halves(cache), (append_key, append_value)):
        entries = entries_of(part, kv_layout == "HND")
        put(entries, rows, slot_places(slot_mapping, *entries.shape[:2]))
    return cache


def append_paged_mla_kv_cache_with_slot_mapping_reference(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`append_paged_mla_kv_cache_with_slot_mapping` in plain PyTorch, out of place.

    Returns
    -------
    tuple of torch.Tensor
        Both caches with the rows in them.
    """
    caches = ckv_cache.clone(), kpe_cache.clone()
    places = slot_places(slot_mapping, *ckv_cache.shape[:2])
    put(caches[0], append_ckv, places)
    put(caches[1], append_kpe, places)
    return caches


@appends(
    "append_key:tensor append_value:tensor slot_mapping:tensor k_cache!:tensor v_cache!?:tensor "
    "kv_layout enable_pdl:pdl",
    "Keys and values into the entries of a paged cache that their slots name.",
    append_paged_kv_cache_with_slot_mapping_reference,
)
@documented(append_paged_kv_cache)
def append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
) -> None:
    r"""Write keys and values to the slots of a paged KV cache, in place.

    .. math::

        cache_{page, entry, h} = append_{i, h}, \quad
        page = \lfloor slot_i / page\_size \rfloor, \quad entry = slot_i \bmod page\_size

    bit for bit.

    Parameters
    ----------
    slot_mapping : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: ``page * page_size + entry`` of each token; one
        with a negative slot is left out. It may be shorter: what is appended may be padded.

    Raises
    ------
    precast.errors.CacheLayoutError, ValueError
        As :func:`append_paged_kv_cache`.

    Notes
    -----
    A slot past the cache raises nothing, because the GPU alone knows it; its token is left out. Of
    two tokens for one slot either may win. No allocation; safe in CUDA graphs; not differentiable.
    For a cache of fewer bits there is
    :func:`fp8_quantize_append_paged_kv_cache_with_slot_mapping`. Source: arXiv:2309.06180.

    Examples
    --------
    >>> import torch, precast
    >>> rows, cache = torch.ones(2, 1, 2), torch.zeros(2, 2, 2, 1, 2)
    >>> slots = torch.tensor([3, -1])
    >>> with precast.reference_mode():
    ...     precast.append_paged_kv_cache_with_slot_mapping(rows, 2 * rows, slots, cache)
    >>> cache[1, :, 1].flatten(), int(cache.sum())
    (tensor([1., 1., 2., 2.]), 6)
    """


@appends(
    "append_ckv:tensor append_kpe:tensor slot_mapping:tensor ckv_cache!:tensor kpe_cache!:tensor "
    "enable_pdl:pdl",
    "Both parts of MLA entries into the entries of a paged cache that their slots name.",
    append_paged_mla_kv_cache_with_slot_mapping_reference,
)
@documented(append_paged_mla_kv_cache, append_paged_kv_cache_with_slot_mapping)
def append_paged_mla_kv_cache_with_slot_mapping(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    enable_pdl: bool | None = None,
) -> None:
    r"""Write compressed keys and values and rotary keys of MLA to their slots, in place.

    .. math::

        ckv\_cache_{page, entry} = append\_ckv_i, \quad
        kpe\_cache_{page, entry} = append\_kpe_i

    with page and entry as in :func:`append_paged_kv_cache_with_slot_mapping`, bit for bit.

    Raises
    ------
    ValueError
        As :func:`append_paged_kv_cache`.

    Notes
    -----
    As :func:`append_paged_kv_cache_with_slot_mapping`. Source: arXiv:2405.04434.

    Examples
    --------
    >>> import torch, precast
    >>> cache, slots = torch.zeros(1, 2, 3), torch.tensor([1])
    >>> rows, caches = (torch.ones(1, 2), torch.ones(1, 1)), (cache[..., :2], cache[..., 2:])
    >>> with precast.reference_mode():
    ...     precast.append_paged_mla_kv_cache_with_slot_mapping(*rows, slots, *caches)
    >>> cache
    tensor([[[0., 0., 0.],
             [1., 1., 1.]]])
    """
