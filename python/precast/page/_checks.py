# SPDX-License-Identifier: Apache-2.0
"""What reference mode refuses before it writes: what the bindings refuse, in their words."""

from __future__ import annotations

from collections.abc import Sequence

from precast._reference_checks import check_elements_apart, check_memory_apart
from precast._torch import torch
from precast.page._cache import Cache

_MOST_ENTRIES = 2**31 - 1


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_device(
    export: str, name: str, tensor: torch.Tensor, other: torch.Tensor, to: str
) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{export}: {name} must be on {other.device} as {to}, got {tensor.device}")


def check_index(
    export: str, name: str, tensor: torch.Tensor, other: torch.Tensor, to: str, count: int
) -> None:
    """``tensor`` is ``count`` int32 or int64 numbers."""
    _check_device(export, name, tensor, other, to)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{export}: {name} must be int32 or int64, got {_word(tensor.dtype)}")
    if tensor.shape != (count,):
        raise ValueError(f"{export}: {name} must have shape [{count}], got {[*tensor.shape]}")


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
    check_index(export, "slot_mapping", slot_mapping, rows, to, slot_mapping.numel())


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
            f"{export}: {names[0]} must have elements of 1, 2 or 4 bytes, got {_word(first.dtype)}"
        )
    if dtypes is not None and first.dtype not in dtypes:
        legal = " or ".join(map(_word, dtypes))
        raise ValueError(f"{export}: {names[0]} must be {legal}, got {_word(first.dtype)}")
    _check_device(export, names[1], second, first, names[0])
    if second.dtype != first.dtype:
        raise ValueError(
            f"{export}: {names[1]} must be {_word(first.dtype)}, got {_word(second.dtype)}"
        )
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
            f"{export}: {name} must be {_word(rows.dtype)} as {to}, got {_word(cache.dtype)}"
        )


def check_fp8_cache(export: str, name: str, cache: torch.Tensor) -> None:
    """``cache`` is of a type that rows are quantised to."""
    legal = (torch.float8_e4m3fn, torch.float8_e5m2)
    if cache.dtype not in legal:
        raise ValueError(
            f"{export}: {name} must be {' or '.join(map(_word, legal))}, got {_word(cache.dtype)}"
        )


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
        geometry.append(_pages(export, name, cache, row_names[i], rows[i], hnd, both))
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


def _pages(
    export: str,
    name: str,
    cache: torch.Tensor,
    to: str,
    rows: torch.Tensor,
    hnd: bool | None,
    both: bool,
) -> tuple[int, int]:
    """Pages and page size of a cache that takes ``rows``."""
    _check_device(export, name, cache, rows, to)
    least, most = (3, 3) if hnd is None else (3 + both, 4 + both)
    if not least <= cache.dim() <= most:
        raise ValueError(
            f"{export}: {name} must have {least} to {most} dimensions, got shape {[*cache.shape]}"
        )
    shape = [*cache.shape]
    if both and shape.pop(1) != 2:
        raise ValueError(
            f"{export}: {name} must hold keys and values in dimension 1 of size 2, got shape "
            f"{[*cache.shape]}"
        )
    heads = 1 if hnd is None else rows.shape[1]
    has_entries = hnd is None or len(shape) == 4
    if hnd is None:
        fits = shape[-1] == rows.shape[-1]
    else:
        at = 2 if has_entries and not hnd else 1
        fits = shape[at] == heads and shape[-1] == rows.shape[-1]
    if not fits:
        layout = "" if hnd is None else f" in layout {'HND' if hnd else 'NHD'}"
        raise ValueError(
            f"{export}: {name} must hold rows of {heads} x {rows.shape[-1]} as {to}, got shape "
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
    check_index(export, "batch_indices", batch_indices, rows, to, rows.shape[0])
    check_index(export, "positions", positions, rows, to, rows.shape[0])
    check_indptr(export, "kv_indptr", kv_indptr)
    batch = kv_indptr.numel() - 1
    check_index(export, "kv_indptr", kv_indptr, rows, to, batch + 1)
    check_index(export, "kv_indices", kv_indices, rows, to, kv_indices.numel())
    check_index(export, "kv_last_page_len", kv_last_page_len, rows, to, batch)


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
        elif cache.dtype != caches[0].dtype:
            wanted = _word(caches[0].dtype)
            raise ValueError(f"{export}: {name} must be {wanted}, got {_word(cache.dtype)}")
    check_caches(export, names, caches, row_names, rows, hnd)


def check_scale(
    export: str, name: str, scale: torch.Tensor | None, rows: torch.Tensor, to: str
) -> None:
    """``scale`` is one float32 number, if it is a tensor."""
    if scale is None:
        return
    _check_device(export, name, scale, rows, to)
    if scale.dtype != torch.float32:
        raise ValueError(f"{export}: {name} must be float32, got {_word(scale.dtype)}")
    if scale.numel() != 1:
        raise ValueError(f"{export}: {name} must hold one number, got shape {[*scale.shape]}")
