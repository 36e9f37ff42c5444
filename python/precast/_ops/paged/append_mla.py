# SPDX-License-Identifier: Apache-2.0
"""Entries of multi-head latent attention into a paged cache, by page table.

Sources: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434 (what an entry is); Ye et al., FlashInfer,
arXiv:2501.01005 (the page table).
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._ops.paged import _checks
from precast._ops.paged._cache import put, table_places
from precast._ops.paged._trace import TABLE, mla_trace
from precast.api_logging import precast_api


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
    """:func:`append_paged_mla_kv_cache` in plain PyTorch, out of place.

    Parameters
    ----------
    append_ckv, append_kpe : torch.Tensor
        ``[nnz, head_dim_ckv]`` and ``[nnz, head_dim_kpe]``, any device.
    batch_indices, positions : torch.Tensor
        ``[nnz]``.
    ckv_cache, kpe_cache : torch.Tensor
        ``[pages, page_size, ...]``, not changed.
    kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        The page table.

    Returns
    -------
    tuple of torch.Tensor
        Both caches with the rows in them.

    Examples
    --------
    >>> import torch
    >>> one, cache = torch.tensor([1]), torch.zeros(2, 2, 3)
    >>> table = torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([2])
    >>> rows = torch.ones(1, 2), torch.ones(1, 1)
    >>> caches = cache[..., :2], cache[..., 2:]
    >>> new = append_paged_mla_kv_cache_reference(*rows, one - 1, one, *caches, *table)
    >>> new[0][1].tolist(), new[1][1].tolist()
    ([[0.0, 0.0], [1.0, 1.0]], [[0.0], [1.0]])
    """
    caches = ckv_cache.clone(), kpe_cache.clone()
    pages, page_size = ckv_cache.shape[:2]
    places = table_places(batch_indices, positions, kv_indices, kv_indptr, pages, page_size)
    put(caches[0], append_ckv, places)
    put(caches[1], append_kpe, places)
    return caches


def _check(
    export: str,
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    **given: Any,
) -> None:
    _checks.check_mla(export, (append_ckv, append_kpe), (ckv_cache, kpe_cache))
    table = {name: given[name] for name in _checks.TABLE}
    _checks.check_table(export, append_ckv, "append_ckv", **table)


_APPEND_MLA = Export(
    "page",
    "append_paged_mla_kv_cache",
    "append_ckv:tensor append_kpe:tensor batch_indices:tensor positions:tensor ckv_cache!:tensor "
    "kpe_cache!:tensor kv_indices:tensor kv_indptr:tensor kv_last_page_len:tensor enable_pdl:pdl",
    reference=append_paged_mla_kv_cache_reference,
    check=_check,
)

_TRACE = mla_trace(
    "append_paged_mla_kv_cache",
    "Both parts of MLA entries into the entries of a paged cache that a page table gives them.",
    append_paged_mla_kv_cache_reference,
    TABLE,
)


@precast_api(trace=_TRACE)
@launches(_APPEND_MLA)
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
        ``[nnz, head_dim_ckv]`` (512 in DeepSeek's models) of any element type of 1, 2 or 4 bytes,
        on a CUDA device; stride 1 in the last dimension.
    append_kpe : torch.Tensor
        ``[nnz, head_dim_kpe]`` (64), likewise.
    batch_indices, positions : torch.Tensor
        ``[nnz]``, as :func:`append_paged_kv_cache` takes them.
    ckv_cache : torch.Tensor
        ``[pages, page_size, head_dim_ckv]``, the dtype of ``append_ckv``, or uint8 for another type
        of 8 bits; stride 1 in the last dimension, any in the others.
    kpe_cache : torch.Tensor
        ``[pages, page_size, head_dim_kpe]``, likewise. Both may be slices of one buffer.
    kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        The page table, as :func:`append_paged_kv_cache` takes it.
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

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
