# SPDX-License-Identifier: Apache-2.0
"""Into a paged KV cache by slots, which is what serving engines keep for each token.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, launches, op
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
    slot_places,
    split,
)
from precast._ops.paged._trace import SLOTS, kv_trace, mla_trace
from precast.api_logging import precast_api


def append_paged_kv_cache_with_slot_mapping_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_layout: str = "NHD",
) -> Cache:
    """:func:`append_paged_kv_cache_with_slot_mapping` in plain PyTorch, out of place.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``[tokens, heads, head_dim]``, any device.
    slot_mapping : torch.Tensor
        ``[tokens]`` or fewer.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        The cache, which is not changed.
    kv_layout : str
        ``NHD`` or ``HND``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The cache with the rows in it.

    Examples
    --------
    >>> import torch
    >>> rows, cache = torch.ones(2, 1, 2), torch.zeros(2, 2, 2, 1, 2)
    >>> slots = torch.tensor([3, -1])
    >>> new = append_paged_kv_cache_with_slot_mapping_reference(rows, 2 * rows, slots, cache)
    >>> new[1, :, 1].flatten(), int(new.sum())
    (tensor([1., 1., 2., 2.]), 6)
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

    Parameters
    ----------
    append_ckv, append_kpe : torch.Tensor
        ``[tokens, head_dim_ckv]`` and ``[tokens, head_dim_kpe]``, any device.
    slot_mapping : torch.Tensor
        ``[tokens]`` or fewer.
    ckv_cache, kpe_cache : torch.Tensor
        ``[pages, page_size, ...]``, not changed.

    Returns
    -------
    tuple of torch.Tensor
        Both caches with the rows in them.

    Examples
    --------
    >>> import torch
    >>> rows, caches = (torch.ones(1, 2), torch.ones(1, 1)), torch.zeros(1, 2, 3).split([2, 1], -1)
    >>> slots = torch.tensor([1])
    >>> append_paged_mla_kv_cache_with_slot_mapping_reference(*rows, slots, *caches)[0]
    tensor([[[0., 0.],
             [1., 1.]]])
    """
    caches = ckv_cache.clone(), kpe_cache.clone()
    places = slot_places(slot_mapping, *ckv_cache.shape[:2])
    put(caches[0], append_ckv, places)
    put(caches[1], append_kpe, places)
    return caches


def _check(
    export: str,
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    hnd: bool,
) -> None:
    _checks.check_kv(export, (append_key, append_value), paged_kv_cache, hnd)
    _checks.check_slots(export, slot_mapping, append_key, "append_key")


def _check_mla(
    export: str,
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
) -> None:
    _checks.check_mla(export, (append_ckv, append_kpe), (ckv_cache, kpe_cache))
    _checks.check_slots(export, slot_mapping, append_ckv, "append_ckv")


_APPEND = Export(
    "page",
    "append_paged_kv_cache_with_slot_mapping",
    "append_key:tensor append_value:tensor slot_mapping:tensor k_cache!:tensor v_cache!?:tensor "
    "hnd:bool enable_pdl:pdl",
    reference=append_paged_kv_cache_with_slot_mapping_reference,
    check=_check,
    derived=DERIVED,
)
_APPEND_MLA = Export(
    "page",
    "append_paged_mla_kv_cache_with_slot_mapping",
    "append_ckv:tensor append_kpe:tensor slot_mapping:tensor ckv_cache!:tensor kpe_cache!:tensor "
    "enable_pdl:pdl",
    reference=append_paged_mla_kv_cache_with_slot_mapping_reference,
    check=_check_mla,
)

_TRACE = kv_trace(
    "append_paged_kv_cache_with_slot_mapping",
    "Keys and values into the entries of a paged cache that their slots name.",
    append_paged_kv_cache_with_slot_mapping_reference,
    SLOTS,
)
_MLA_TRACE = mla_trace(
    "append_paged_mla_kv_cache_with_slot_mapping",
    "Both parts of MLA entries into the entries of a paged cache that their slots name.",
    append_paged_mla_kv_cache_with_slot_mapping_reference,
    SLOTS,
)


@precast_api(trace=_TRACE)
@op("page", explain=check_call)
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
    append_key, append_value : torch.Tensor
        ``[tokens, heads, head_dim]``, as :func:`append_paged_kv_cache` takes them.
    slot_mapping : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: ``page * page_size + entry`` of each token; one
        with a negative slot is left out. It may be shorter: what is appended may be padded.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        As :func:`append_paged_kv_cache` takes it.
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
    hnd = is_hnd(kv_layout)
    k_cache, v_cache = split(paged_kv_cache)
    _APPEND.launch(append_key, append_value, slot_mapping, k_cache, v_cache, hnd, enable_pdl)


@precast_api(trace=_MLA_TRACE)
@launches(_APPEND_MLA)
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

    Parameters
    ----------
    append_ckv, append_kpe : torch.Tensor
        ``[tokens, head_dim_ckv]`` and ``[tokens, head_dim_kpe]``, as
        :func:`append_paged_mla_kv_cache` takes them.
    slot_mapping : torch.Tensor
        ``[tokens]``, as :func:`append_paged_kv_cache_with_slot_mapping` takes it.
    ckv_cache, kpe_cache : torch.Tensor
        ``[pages, page_size, ...]``, as :func:`append_paged_mla_kv_cache` takes them: slices of one
        buffer, or two.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

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
