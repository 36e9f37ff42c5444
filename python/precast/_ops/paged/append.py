# SPDX-License-Identifier: Apache-2.0
"""Keys and values into a paged cache, by page table.

Sources: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, arXiv:2309.06180; Ye et al., FlashInfer, arXiv:2501.01005 (the page table).
"""

from __future__ import annotations

from typing import Any

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
    split,
    table_places,
)
from precast._ops.paged._trace import TABLE, kv_trace
from precast.api_logging import precast_api


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
    """:func:`append_paged_kv_cache` in plain PyTorch, out of place.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``[nnz, heads, head_dim]``, any device.
    batch_indices, positions : torch.Tensor
        ``[nnz]``.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        The cache, which is not changed.
    kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        The page table.
    kv_layout : str
        ``NHD`` or ``HND``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The cache with the rows in it.

    Examples
    --------
    >>> import torch
    >>> rows, one = torch.ones(1, 1, 2), torch.tensor([1])
    >>> cache = torch.zeros(2, 2, 2, 1, 2)
    >>> table = torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([2])
    >>> new = append_paged_kv_cache_reference(rows, 2 * rows, one - 1, one, cache, *table)
    >>> new[1, :, 1].flatten()
    tensor([1., 1., 2., 2.])
    """
    hnd = kv_layout == "HND"
    cache = copied(paged_kv_cache)
    for part, rows in zip(halves(cache), (append_key, append_value)):
        entries = entries_of(part, hnd)
        pages, page_size = entries.shape[:2]
        places = table_places(batch_indices, positions, kv_indices, kv_indptr, pages, page_size)
        put(entries, rows, places)
    return cache


def _check(
    export: str,
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    paged_kv_cache: Cache,
    hnd: bool,
    **given: Any,
) -> None:
    _checks.check_kv(export, (append_key, append_value), paged_kv_cache, hnd)
    table = {name: given[name] for name in _checks.TABLE}
    _checks.check_table(export, append_key, "append_key", **table)


_APPEND = Export(
    "page",
    "append_paged_kv_cache",
    "append_key:tensor append_value:tensor batch_indices:tensor positions:tensor k_cache!:tensor "
    "v_cache!?:tensor kv_indices:tensor kv_indptr:tensor kv_last_page_len:tensor hnd:bool "
    "enable_pdl:pdl",
    reference=append_paged_kv_cache_reference,
    check=_check,
    derived=DERIVED,
)

_TRACE = kv_trace(
    "append_paged_kv_cache",
    "Keys and values into the entries of a paged cache that a page table gives their positions.",
    append_paged_kv_cache_reference,
    TABLE,
)


@precast_api(trace=_TRACE)
@op("page", explain=check_call)
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
        ``[nnz, heads, head_dim]`` of any element type of 1, 2 or 4 bytes, on a CUDA device; stride
        1 in the last dimension, any in the others (heads of a packed qkv).
    append_value : torch.Tensor
        The same for values; ``head_dim`` may be another one where the cache is a tuple.
    batch_indices, positions : torch.Tensor
        ``[nnz]``, int32 or int64, contiguous: the request of each token, and its position in it, as
        :func:`get_batch_indices_positions` makes them. A token with a negative index is left out.
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
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

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
    hnd = is_hnd(kv_layout)
    k_cache, v_cache = split(paged_kv_cache)
    _APPEND.launch(
        append_key,
        append_value,
        batch_indices,
        positions,
        k_cache,
        v_cache,
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        hnd,
        enable_pdl,
    )
