# SPDX-License-Identifier: Apache-2.0
"""What the dequantisation of a paged KV cache checks in reference mode, as its binding does.

Strides and alignment are left to the binding: a reference takes any.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.validation import (
    check_dtype,
    check_elements_apart,
    check_memory_apart,
    check_one_number,
    check_rank,
)
from precast._ops.paged._cache import Cache
from precast._ops.paged._checks import pages_of

E4M3_BYTES = (torch.float8_e4m3fn, torch.uint8)


def check_paged_call(
    export: str,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    hnd: bool,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
) -> None:
    """Caches and page table fit the outputs, which lie apart from all that is read."""
    caches = _named("paged_kv_cache", paged_kv_cache)
    factors = _named("kv_cache_sf", kv_cache_sf)
    scales = [("k_scale", k_scale), ("v_scale", v_scale)]
    outputs = [("output_k", output_k), ("output_v", output_v)]
    for name, cache in caches:
        check_dtype(export, name, cache, torch.uint8)
    for name, factor in factors:
        check_dtype(export, name, factor, *E4M3_BYTES)
    _check_outputs(export, output_k, output_v)
    first_name, first = caches[0]
    pages: tuple[int, int] | None = None
    for i, (word, out) in enumerate(outputs):
        for parts, public, per_byte in ((caches, paged_kv_cache, 2), (factors, kv_cache_sf, 16)):
            both, size = not isinstance(public, tuple), out.shape[3] // per_byte
            got = pages_of(export, *parts[i], word, out, hnd, both, size)
            pages = pages or got
            if got != pages:
                raise ValueError(
                    f"{export}: {parts[i][0]} must have {pages[0]} pages of {pages[1]} as "
                    f"{first_name}, got {got[0]} of {got[1]}"
                )
        check_one_number(export, *scales[i], first, first_name)
    assert pages is not None
    _check_table(export, block_tables, seq_lens, pages[1], output_k)
    read = [*caches, *factors, *scales, ("block_tables", block_tables), ("seq_lens", seq_lens)]
    for word, out in outputs:
        check_elements_apart(export, word, out)
        for name, tensor in read:
            check_memory_apart(export, word, out, tensor, name)
    check_memory_apart(export, "output_v", output_v, output_k, "output_k")


def _named(name: str, cache: Cache) -> list[tuple[str, torch.Tensor]]:
    """The tensor of keys and that of values with their names in errors; one may be both."""
    if isinstance(cache, tuple):
        return [(f"{name}[{i}]", part) for i, part in enumerate(cache)]
    return [(name, cache)] * 2


def _check_outputs(export: str, output_k: torch.Tensor, output_v: torch.Tensor) -> None:
    for name, out in (("output_k", output_k), ("output_v", output_v)):
        check_rank(export, name, out, 4, 4)
        if out.shape[3] % 16:
            raise ValueError(
                f"{export}: {name}'s last dimension must be a multiple of 16, got {out.shape[3]}"
            )
    if output_v.shape[:3] != output_k.shape[:3]:
        raise ValueError(
            f"{export}: output_v must have the requests, tokens and heads of output_k, got "
            f"{[*output_v.shape]} for {[*output_k.shape]}"
        )


def _check_table(
    export: str,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    output_k: torch.Tensor,
) -> None:
    batch, length = output_k.shape[:2]
    if block_tables.dim() != 2 or block_tables.shape[0] != batch:
        raise ValueError(
            f"{export}: block_tables must have shape [{batch}, pages of a request], got "
            f"{[*block_tables.shape]}"
        )
    if block_tables.shape[1] * page_size < length:
        raise ValueError(
            f"{export}: block_tables must have pages of {page_size} entries for the {length} "
            f"tokens of output_k, got {block_tables.shape[1]} pages a request"
        )
    if seq_lens.shape != (batch,):
        raise ValueError(f"{export}: seq_lens must have shape [{batch}], got {[*seq_lens.shape]}")
