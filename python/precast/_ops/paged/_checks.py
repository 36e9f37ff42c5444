# SPDX-License-Identifier: Apache-2.0
"""Validate caches and page tables in reference mode, in the words of the bindings."""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.torch import torch
from precast._op.validation import (
    check_elements_apart,
    check_memory_apart,
    check_rank,
    check_same_device,
)

_MOST_ENTRIES = 2**31 - 1


def check_indptr(export: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless ``tensor`` is ``[batch_size + 1]``."""
    if tensor.dim() != 1 or tensor.numel() < 1:
        raise ValueError(
            f"{export}: {name} must have shape [batch_size + 1], got {[*tensor.shape]}"
        )


def check_caches(
    export: str,
    names: Sequence[str],
    caches: Sequence[torch.Tensor],
    row_names: Sequence[str],
    rows: Sequence[torch.Tensor],
    hnd: bool | None,
    per_byte: int | None = None,
) -> tuple[int, int]:
    """Return pages and page size of the one or two caches if they take ``rows``.

    ``hnd`` is None for MLA. ``per_byte`` is how many numbers of a row a byte of the cache is for.
    """
    both = len(caches) == 1
    geometry = []
    for i in range(2):
        name, cache = names[0 if both else i], caches[0 if both else i]
        size = rows[i].shape[-1] // per_byte if per_byte else None
        geometry.append(pages_of(export, name, cache, row_names[i], rows[i], hnd, both, size))
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
    return geometry[0]


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
    """Return pages and page size of a cache that takes ``rows``, or ``row_bytes`` for each."""
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
