# SPDX-License-Identifier: Apache-2.0
"""Append to a paged cache by page table or slots: keys and values, or entries of MLA.

Sources: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, arXiv:2309.06180; Ye et al., FlashInfer, arXiv:2501.01005 (the page table);
DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434 (what an entry of MLA is).
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.paged._append import appends
from precast._ops.paged._cache import Cache, copied, entries_of, halves, put, table_slots


def append_paged_kv_cache_with_slot_mapping_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_layout: str = "NHD",
) -> Cache:
    """:func:`append_paged_kv_cache_with_slot_mapping` in plain PyTorch, out of place."""
    cache = copied(paged_kv_cache)
    for part, rows in zip(halves(cache), (append_key, append_value)):
        entries = entries_of(part, kv_layout == "HND")
        put(entries, rows, slot_mapping)
    return cache


def append_paged_mla_kv_cache_with_slot_mapping_reference(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`append_paged_mla_kv_cache_with_slot_mapping` in plain PyTorch, out of place."""
    caches = ckv_cache.clone(), kpe_cache.clone()
    put(caches[0], append_ckv, slot_mapping)
    put(caches[1], append_kpe, slot_mapping)
    return caches


def append_paged_kv_cache_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> Cache:
    """:func:`append_paged_kv_cache` in plain PyTorch on any device, out of place."""
    pages, page_size = entries_of(halves(paged_kv_cache)[0], kv_layout == "HND").shape[:2]
    slots = table_slots(batch_indices, positions, kv_indices, kv_indptr, pages, page_size)
    return append_paged_kv_cache_with_slot_mapping_reference(
        append_key, append_value, slots, paged_kv_cache, kv_layout
    )


def append_paged_mla_kv_cache_reference(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`append_paged_mla_kv_cache` in plain PyTorch on any device, out of place."""
    pages, page_size = ckv_cache.shape[:2]
    slots = table_slots(batch_indices, positions, kv_indices, kv_indptr, pages, page_size)
    return append_paged_mla_kv_cache_with_slot_mapping_reference(
        append_ckv, append_kpe, slots, ckv_cache, kpe_cache
    )


@appends(
    "append_key:tensor append_value:tensor batch_indices:tensor positions:tensor k_cache!:tensor "
    "v_cache!?:tensor kv_indices:tensor kv_indptr:tensor kv_last_page_len:tensor kv_layout "
    "enable_pdl:pdl",
    "Keys and values into the entries of a paged cache that a page table gives their positions.",
)
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
) -> None:
    r"""Append keys and values to a paged KV cache, in place.

    .. math::

        cache_{page, entry, h} = append_{i, h}, \quad
        page = indices_{indptr_b + \lfloor p / page\_size \rfloor}, \quad
        entry = p \bmod page\_size

    for each token :math:`i` of request :math:`b = batch\_indices_i` at position
    :math:`p = positions_i`, bit for bit.

    Parameters
    ----------
    append_key : torch.Tensor
        ``[tokens, heads, head_dim]`` of any element type of 1, 2 or 4 bytes, on a CUDA device;
        stride 1 in the last dimension, any in the others (heads of a packed qkv).
    append_value : torch.Tensor
        The same for values; ``head_dim`` may be another one where the cache is a tuple.
    batch_indices, positions : torch.Tensor
        ``[tokens]``, int32 or int64, contiguous: the request of each token, and its position in it,
        as :func:`get_batch_indices_positions` makes them. A token with a negative index is left
        out.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        ``[pages, 2, page_size, heads, head_dim]`` in layout ``NHD``,
        ``[pages, 2, heads, page_size, head_dim]`` in ``HND``; keys first. Or a tuple of a tensor of
        keys and one of values, without the dimension of 2. Page size 1 may be left out of the
        shape. The dtype of ``append_key``, or uint8 for another type of 8 bits. Stride 1 in the
        last dimension, any in the others; any page size.
    kv_indices : torch.Tensor
        ``[pages of all requests]``, int32 or int64, contiguous: the pages of each request.
    kv_indptr : torch.Tensor
        ``[batch_size + 1]``, likewise: where the pages of each request start.
    kv_last_page_len : torch.Tensor
        ``[batch_size]``, likewise: entries of the last page. Not read: positions say it.
    kv_layout : str
        ``NHD`` or ``HND``.

    Raises
    ------
    precast.errors.CacheLayoutError
        Another layout, or a cache that is neither a tensor nor a tuple of two (a ``KeyError`` and a
        ``ValueError``).
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above; a
        cache that overlaps itself or what is appended.

    Notes
    -----
    ``kv_indptr`` and ``kv_indices`` count the appended tokens already. What indices hold is not
    known without waiting for the GPU, so it raises nothing: a token whose request does not exist,
    whose position is past the pages of its request, or whose page is not in the cache is left out.
    Of two tokens for one entry either may win. No allocation; safe in CUDA graphs; not
    differentiable. Addresses, strides and rows that are multiples of 16 bytes are fastest. Source:
    arXiv:2309.06180, arXiv:2501.01005.

    Examples
    --------
    >>> import torch, precast
    >>> rows, one = torch.ones(1, 1, 2), torch.tensor([1])
    >>> cache = torch.zeros(2, 2, 2, 1, 2)
    >>> table = torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([2])
    >>> with precast.reference_mode():
    ...     precast.append_paged_kv_cache(rows, 2 * rows, one - 1, one, cache, *table)
    >>> cache[1, :, 1].flatten()
    tensor([1., 1., 2., 2.])
    """


@appends(
    "append_ckv:tensor append_kpe:tensor batch_indices:tensor positions:tensor ckv_cache!:tensor "
    "kpe_cache!:tensor kv_indices:tensor kv_indptr:tensor kv_last_page_len:tensor enable_pdl:pdl",
    "Both parts of MLA entries into the entries of a paged cache that a page table gives them.",
)
@documented(append_paged_kv_cache)
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    enable_pdl: bool | None = None,
) -> None:
    r"""Append compressed keys and values and rotary keys of MLA to their paged caches, in place.

    .. math::

        ckv\_cache_{page, entry} = append\_ckv_i, \quad
        kpe\_cache_{page, entry} = append\_kpe_i

    with page and entry as in :func:`append_paged_kv_cache`, bit for bit.

    Parameters
    ----------
    append_ckv : torch.Tensor
        ``[tokens, head_dim_ckv]`` (512 in DeepSeek's models) of any element type of 1, 2 or 4
        bytes, on a CUDA device; stride 1 in the last dimension.
    append_kpe : torch.Tensor
        ``[tokens, head_dim_kpe]`` (64), likewise.
    ckv_cache : torch.Tensor
        ``[pages, page_size, head_dim_ckv]``, the dtype of ``append_ckv``, or uint8 for another type
        of 8 bits; stride 1 in the last dimension, any in the others.
    kpe_cache : torch.Tensor
        ``[pages, page_size, head_dim_kpe]``, likewise. Both may be slices of one buffer.

    Raises
    ------
    ValueError
        As :func:`append_paged_kv_cache`.

    Notes
    -----
    As :func:`append_paged_kv_cache`. Source: arXiv:2405.04434.

    Examples
    --------
    >>> import torch, precast
    >>> one, cache = torch.tensor([1]), torch.zeros(2, 2, 3)
    >>> table = torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([2])
    >>> rows = torch.ones(1, 2), torch.ones(1, 1)
    >>> caches = cache[..., :2], cache[..., 2:]
    >>> with precast.reference_mode():
    ...     precast.append_paged_mla_kv_cache(*rows, one - 1, one, *caches, *table)
    >>> cache[1].tolist()
    [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """


@appends(
    "append_key:tensor append_value:tensor slot_mapping:tensor k_cache!:tensor v_cache!?:tensor "
    "kv_layout enable_pdl:pdl",
    "Keys and values into the entries of a paged cache that their slots name.",
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
