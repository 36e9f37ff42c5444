# SPDX-License-Identifier: Apache-2.0
"""What the append to a paged cache refuses in reference mode, in the binding's words."""

from __future__ import annotations

from collections.abc import Mapping

from precast._reference_checks import check_indices, check_rank, check_same_device, dtype_word
from precast._torch import torch
from precast.rope._checks import check_like, check_tokens
from precast.rope._quantize import check_outputs, check_parts


def check_append(
    export: str,
    inputs: Mapping[str, torch.Tensor],
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    caches: Mapping[str, torch.Tensor],
    table: Mapping[str, torch.Tensor],
    places: Mapping[str, torch.Tensor],
    page_size: int,
    is_hnd: bool,
    outputs: dict[str, torch.Tensor],
) -> None:
    """``inputs`` are the four parts and the values."""
    parts = {name: x for name, x in inputs.items() if name != "v"}
    first, k_rope, k_nope, v = (inputs[name] for name in ("q_rope", "k_rope", "k_nope", "v"))
    check_parts(export, first, k_rope, inputs["q_nope"], k_nope, cos_sin_cache, pos_ids, (2, 3))
    check_outputs(export, outputs, parts)
    if page_size <= 0:
        raise ValueError(f"{export}: page_size must be positive, got {page_size}")
    if any(x.dim() != 1 for x in table.values()):
        shapes = [[*x.shape] for x in table.values()]
        raise ValueError(
            f"{export}: kv_indices and kv_indptr must have 1 dimension, got shapes {shapes[0]} and "
            f"{shapes[1]}"
        )
    for name, x in table.items():
        check_indices(export, name, x, x.shape[0], first, "q_rope")
    for name, x in places.items():
        check_indices(export, name, x, first.shape[0], first, "q_rope")
    if table["kv_indptr"].shape[0] < 1:
        raise ValueError(f"{export}: kv_indptr must have shape [requests + 1], got [0]")
    if k_rope.dim() == 2:
        sizes = [(1, k_nope.shape[-1]), (1, k_rope.shape[-1])]
    else:
        check_like(export, "v", v, "q_rope", first)
        check_rank(export, "v", v, 3, 3)
        check_tokens(export, "v", v, "k_rope", k_rope)
        sizes = [
            (k_rope.shape[1], k_rope.shape[-1] + k_nope.shape[-1]),
            (v.shape[1], v.shape[2]),
        ]
    dtype = outputs["q_rope_out"].dtype
    for (name, cache), (heads, dim) in zip(caches.items(), sizes):
        _check_cache(export, name, cache, first, dtype, k_rope.dim(), is_hnd, page_size, heads, dim)


def _check_cache(
    export: str,
    name: str,
    cache: torch.Tensor,
    first: torch.Tensor,
    dtype: torch.dtype,
    key_rank: int,
    is_hnd: bool,
    page_size: int,
    heads: int,
    dim: int,
) -> None:
    check_same_device(export, name, cache, first, "q_rope")
    if cache.dtype != dtype:
        wanted, got = (dtype_word(d) for d in (dtype, cache.dtype))
        raise ValueError(f"{export}: {name} must be {wanted}, got {got}")
    check_rank(export, name, cache, key_rank + 1, key_rank + 1)
    if key_rank == 2:
        shape, wanted_sizes = "[pages, page_size, dim]", [page_size, dim]
    elif is_hnd:
        shape, wanted_sizes = "[pages, heads, page_size, dim]", [heads, page_size, dim]
    else:
        shape, wanted_sizes = "[pages, page_size, heads, dim]", [page_size, heads, dim]
    if [*cache.shape[1:]] != wanted_sizes:
        raise ValueError(
            f"{export}: {name} must have the shape {shape} with page_size {page_size}, heads "
            f"{heads} and dim {dim}, got {[*cache.shape]}"
        )
