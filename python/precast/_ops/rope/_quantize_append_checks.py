# SPDX-License-Identifier: Apache-2.0
"""What the append to a paged cache refuses in reference mode, in the binding's words."""

from __future__ import annotations

from collections.abc import Mapping

from precast._base.torch import torch
from precast._op.validation import (
    check_device_and_dtype,
    check_indices,
    check_memory_apart,
    check_rank,
)
from precast._ops.paged._cache import entries_of
from precast._ops.paged._checks import check_caches, check_indptr
from precast._ops.rope._checks import check_like, check_tokens
from precast._ops.rope._quantize import check_outputs, check_parts

_NAMES = ("paged_kv_cache[0]", "paged_kv_cache[1]")


def check_append(
    export: str,
    inputs: Mapping[str, torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: Mapping[str, torch.Tensor],
    places: Mapping[str, torch.Tensor],
    page_size: int,
    is_hnd: bool,
    outputs: dict[str, torch.Tensor],
) -> None:
    """``inputs`` are the four parts and the values."""
    first, k_rope, k_nope, v = (inputs[name] for name in ("q_rope", "k_rope", "k_nope", "v"))
    check_parts(export, first, k_rope, inputs["q_nope"], k_nope, cos_sin_cache, pos_ids, (2, 3))
    rank = k_rope.dim()
    check_like(export, "v", v, "q_rope", first)
    check_rank(export, "v", v, rank, rank)
    check_tokens(export, "v", v, "k_rope", k_rope)
    check_outputs(export, outputs, inputs)
    _check_table(export, first, table, places)

    dtype = outputs["q_rope_out"].dtype
    for name, cache in zip(_NAMES, caches):
        check_device_and_dtype(export, name, cache, first, dtype, "q_rope")
    if rank == 2:
        row_names, rows, hnd = ("k_nope", "k_rope"), (k_nope, k_rope), None
    else:
        # Shape alone: a row of keys holds both parts.
        keys = k_rope[..., :1].expand(-1, -1, k_rope.shape[-1] + k_nope.shape[-1])
        row_names, rows, hnd = ("k_rope", "v"), (keys, v), is_hnd
    check_caches(export, _NAMES, caches, row_names, rows, hnd)
    entries = caches[0] if rank == 2 else entries_of(caches[0], is_hnd)
    if page_size <= 0 or page_size != entries.shape[1]:
        raise ValueError(
            f"{export}: page_size must be positive and {entries.shape[1]} as {_NAMES[0]} has, got "
            f"{page_size}"
        )
    for name, cache in zip(_NAMES, caches):
        for other_name, other in {**inputs, **outputs}.items():
            check_memory_apart(export, name, cache, other, other_name)


def _check_table(
    export: str,
    first: torch.Tensor,
    table: Mapping[str, torch.Tensor],
    places: Mapping[str, torch.Tensor],
) -> None:
    check_indptr(export, "kv_indptr", table["kv_indptr"])
    check_rank(export, "kv_indices", table["kv_indices"], 1, 1)
    for name, x in places.items():
        check_indices(export, name, x, first.shape[0], first, "q_rope")
    for name, x in table.items():
        check_indices(export, name, x, x.shape[0], first, "q_rope")
