# SPDX-License-Identifier: Apache-2.0
"""Entries of multi-head latent attention into a paged cache, by page table.

Sources: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434 (what an entry is); Ye et al., FlashInfer,
arXiv:2501.01005 (the page table).
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel, check_tensors
from precast._op.torch_ops import torch_ops
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


def _append_paged_mla_kv_cache_into(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    enable_pdl: bool,
) -> None:
    name = "append_paged_mla_kv_cache"
    _checks.check_mla(name, (append_ckv, append_kpe), (ckv_cache, kpe_cache))
    table = kv_indices, kv_indptr, kv_last_page_len
    _checks.check_table(name, append_ckv, "append_ckv", batch_indices, positions, *table)
    pages, page_size = ckv_cache.shape[:2]
    places = table_places(batch_indices, positions, kv_indices, kv_indptr, pages, page_size)
    put(ckv_cache, append_ckv, places)
    put(kpe_cache, append_kpe, places)


def _key(append_ckv: torch.Tensor, *others: object) -> tuple[int]:
    return (append_ckv.get_device(),)


_append_paged_mla_kv_cache = Kernel(
    "page",
    "append_paged_mla_kv_cache",
    schema="(Tensor append_ckv, Tensor append_kpe, Tensor batch_indices, Tensor positions, "
    "Tensor(a!) ckv_cache, Tensor(b!) kpe_cache, Tensor kv_indices, Tensor kv_indptr, "
    "Tensor kv_last_page_len, bool enable_pdl) -> ()",
    reference=_append_paged_mla_kv_cache_into,
    key=_key,
)

_TRACE = mla_trace(
    "append_paged_mla_kv_cache",
    "Both parts of MLA entries into the entries of a paged cache that a page table gives them.",
    append_paged_mla_kv_cache_reference,
    TABLE,
)


@precast_api(trace=_TRACE)
@backend_requirement({}, common_check=served_by("page"))
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
    try:
        run = (
            torch_ops.append_paged_mla_kv_cache
            if torch.compiler.is_compiling()
            else _append_paged_mla_kv_cache[(append_ckv.get_device(),)]
        )
        run(
            append_ckv,
            append_kpe,
            batch_indices,
            positions,
            ckv_cache,
            kpe_cache,
            kv_indices,
            kv_indptr,
            kv_last_page_len,
            enable_pdl is not False,
        )
    except (AttributeError, TypeError):
        check_tensors(
            "append_paged_mla_kv_cache",
            append_ckv=append_ckv,
            append_kpe=append_kpe,
            batch_indices=batch_indices,
            positions=positions,
            ckv_cache=ckv_cache,
            kpe_cache=kpe_cache,
            kv_indices=kv_indices,
            kv_indptr=kv_indptr,
            kv_last_page_len=kv_last_page_len,
        )
        raise
