# SPDX-License-Identifier: Apache-2.0
"""What reference mode refuses before it writes: what the bindings refuse, in their words."""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.validation import (
    check_device_and_dtype,
    check_dtype,
    check_elements_apart,
    check_indices,
    check_memory_apart,
    check_one_number,
    check_rank,
    check_same_device,
)
from precast._ops.paged._cache import Cache

_MOST_ENTRIES = 2**31 - 1


def check_indptr(export: str, name: str, tensor: torch.Tensor) -> None:
    """``tensor`` is ``[batch_size + 1]``."""
    if tensor.dim() != 1 or tensor.numel() < 1:
        raise ValueError(
            f"{export}: {name} must have shape [batch_size + 1], got {[*tensor.shape]}"
        )


def check_slots(export: str, slot_mapping: torch.Tensor, rows: torch.Tensor, to: str) -> None:
    """``slot_mapping`` has at most one slot for each of ``rows``."""
    if slot_mapping.dim() != 1 or slot_mapping.numel() > rows.shape[0]:
        raise ValueError(
            f"{export}: slot_mapping must have shape [tokens] with at most the {rows.shape[0]} "
            f"tokens of {to}, got {[*slot_mapping.shape]}"
        )
    check_indices(export, "slot_mapping", slot_mapping, slot_mapping.numel(), rows, to)


def check_rows(
    export: str,
    names: Sequence[str],
    rows: Sequence[torch.Tensor],
    rank: int,
    dtypes: Sequence[torch.dtype] | None,
) -> None:
    """The two tensors that are appended fit each other; ``dtypes`` are legal, None: any."""
    first, second = rows
    _check_append_shape(export, names[0], first, rank)
    if dtypes is None and first.element_size() not in (1, 2, 4):
        raise ValueError(
            f"{export}: {names[0]} must have elements of 1, 2 or 4 bytes, got "
            f"{dtype_word(first.dtype)}"
        )
    if dtypes is not None:
        check_dtype(export, names[0], first, *dtypes)
    check_device_and_dtype(export, names[1], second, first, first.dtype, names[0])
    _check_append_shape(export, names[1], second, rank)
    if second.shape[:-1] != first.shape[:-1]:
        raise ValueError(
            f"{export}: {names[1]} must have the tokens and heads of {names[0]}, got "
            f"{[*second.shape]} for {[*first.shape]}"
        )


def _check_append_shape(export: str, name: str, rows: torch.Tensor, rank: int) -> None:
    if rows.dim() != rank:
        wanted = "[tokens, heads, head_dim]" if rank == 3 else "[tokens, head_dim]"
        raise ValueError(f"{export}: {name} must have shape {wanted}, got {[*rows.shape]}")


def check_cache_dtype(
    export: str, name: str, cache: torch.Tensor, rows: torch.Tensor, to: str
) -> None:
    """``cache`` takes ``rows`` as they are."""
    untyped = torch.uint8 in (cache.dtype, rows.dtype)
    bytes_alone = untyped and cache.element_size() == rows.element_size() == 1
    if cache.dtype != rows.dtype and not bytes_alone:
        raise ValueError(
            f"{export}: {name} must be {dtype_word(rows.dtype)} as {to}, got "
            f"{dtype_word(cache.dtype)}"
        )


def check_fp8_cache(export: str, name: str, cache: torch.Tensor) -> None:
    """``cache`` is of a type that rows are quantised to."""
    check_dtype(export, name, cache, torch.float8_e4m3fn, torch.float8_e5m2)


def check_caches(
    export: str,
    names: Sequence[str],
    caches: Sequence[torch.Tensor],
    row_names: Sequence[str],
    rows: Sequence[torch.Tensor],
    hnd: bool | None,
) -> None:
    """Caches that take ``rows``: two, or one that holds both; ``hnd`` is None for MLA."""
    both = len(caches) == 1
    geometry = []
    for i in range(2):
        name, cache = names[0 if both else i], caches[0 if both else i]
        geometry.append(pages_of(export, name, cache, row_names[i], rows[i], hnd, both))
    if geometry[0] != geometry[1]:
        (pages, page_size), (got_pages, got_size) = geometry
        raise ValueError(
            f"{export}: {names[1]} must have {pages} pages of {page_size} as {names[0]}, got "
            f"{got_pages} of {got_size}"
        )
    for i, (name, cache) in enumerate(zip(names, caches)):
        check_elements_apart(export, name, cache)
        for row_name, row in zip(row_names, rows):
            check_memory_apart(export, name, cache, row, row_name)
        if i == 1:
            check_memory_apart(export, name, cache, caches[0], names[0])


def pages_of(
    export: str,
    name: str,
    cache: torch.Tensor,
    to: str,
    rows: torch.Tensor,
    hnd: bool | None,
    both: bool,
    row_bytes: int | None = None,
) -> tuple[int, int]:
    """Pages and page size of a cache that takes ``rows``, or ``row_bytes`` for each of them."""
    check_same_device(export, name, cache, rows, to)
    least, most = (3, 3) if hnd is None else (3 + both, 4 + both)
    check_rank(export, name, cache, least, most)
    shape = [*cache.shape]
    if both and shape.pop(1) != 2:
        raise ValueError(
            f"{export}: {name} must hold keys and values in dimension 1 of size 2, got shape "
            f"{[*cache.shape]}"
        )
    columns = rows.shape[-1] if row_bytes is None else row_bytes
    has_entries = hnd is None or len(shape) == 4
    if hnd is None:
        heads, fits = 1, shape[-1] == columns
    else:
        heads = rows.shape[-2]
        at = 2 if has_entries and not hnd else 1
        fits = shape[at] == heads and shape[-1] == columns
    if not fits:
        layout = "" if hnd is None else f" in layout {'HND' if hnd else 'NHD'}"
        taken = f"as {to}" if row_bytes is None else f"bytes for {to}"
        raise ValueError(
            f"{export}: {name} must hold rows of {heads} x {columns} {taken}, got shape "
            f"{[*cache.shape]}{layout}"
        )
    page_size = shape[2 if hnd else 1] if has_entries else 1
    if shape[0] * page_size > _MOST_ENTRIES:
        raise ValueError(
            f"{export}: {name} must have at most {_MOST_ENTRIES} entries, got shape "
            f"{[*cache.shape]}"
        )
    return shape[0], page_size


# -- whole calls ----------------------------------------------------------------------------------

_KV = ("append_key", "append_value")
_MLA = ("append_ckv", "append_kpe")


#: A page table and the indices of tokens.
TABLE = ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")


def check_table(
    export: str,
    rows: torch.Tensor,
    to: str,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """A page table and the indices of tokens."""
    check_indices(export, "batch_indices", batch_indices, rows.shape[0], rows, to)
    check_indices(export, "positions", positions, rows.shape[0], rows, to)
    check_indptr(export, "kv_indptr", kv_indptr)
    batch = kv_indptr.numel() - 1
    check_indices(export, "kv_indptr", kv_indptr, batch + 1, rows, to)
    check_indices(export, "kv_indices", kv_indices, kv_indices.numel(), rows, to)
    check_indices(export, "kv_last_page_len", kv_last_page_len, batch, rows, to)


def check_kv(
    export: str, rows: Sequence[torch.Tensor], cache: Cache, hnd: bool, to_fp8: bool = False
) -> None:
    """Keys, values and their cache."""
    if isinstance(cache, tuple):
        names: Sequence[str] = ("paged_kv_cache[0]", "paged_kv_cache[1]")
        caches: Sequence[torch.Tensor] = cache
    else:
        names, caches = ("paged_kv_cache",), (cache,)
    _check_append(export, _KV, rows, names, caches, hnd, to_fp8)


def check_mla(
    export: str,
    rows: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    to_fp8: bool = False,
) -> None:
    """The parts of MLA entries and their caches."""
    _check_append(export, _MLA, rows, ("ckv_cache", "kpe_cache"), caches, None, to_fp8)


def _check_append(
    export: str,
    row_names: Sequence[str],
    rows: Sequence[torch.Tensor],
    names: Sequence[str],
    caches: Sequence[torch.Tensor],
    hnd: bool | None,
    to_fp8: bool,
) -> None:
    halves = (torch.float16, torch.bfloat16)
    check_rows(export, row_names, rows, 2 if hnd is None else 3, halves if to_fp8 else None)
    for i, (name, cache) in enumerate(zip(names, caches)):
        if not to_fp8:
            check_cache_dtype(export, name, cache, rows[i], row_names[i])
        elif i == 0:
            check_fp8_cache(export, name, cache)
        else:
            check_dtype(export, name, cache, caches[0].dtype)
    check_caches(export, names, caches, row_names, rows, hnd)


def check_scale(
    export: str, name: str, scale: torch.Tensor | None, rows: torch.Tensor, to: str
) -> None:
    """``scale`` is one float32 number, if it is a tensor."""
    if scale is not None:
        check_one_number(export, name, scale, rows, to)
