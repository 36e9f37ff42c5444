# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of a paged KV cache: what its reference refuses, and its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.validation import (
    check_dtype,
    check_elements_apart,
    check_memory_apart,
    check_one_number,
    check_rank,
    check_same_device,
)
from precast._ops.paged._cache import Cache, entries_of
from precast._ops.paged._trace import by_layout
from precast._ops.quantize._reference_blocks import dequantize, e2m1_unpack
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var


def _names(name: str, cache: Cache) -> tuple[str, str]:
    return (f"{name}[0]", f"{name}[1]") if isinstance(cache, tuple) else (name, name)


def _tensors(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache if isinstance(cache, tuple) else (cache, cache)


def check_outputs(
    export: str, first: torch.Tensor, name: str, outputs: dict[str, torch.Tensor]
) -> None:
    """Both outputs fit each other; ``first`` is the cache's first tensor, ``name`` its name."""
    legal: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    for word, out in outputs.items():
        check_same_device(export, word, out, first, name)
        check_dtype(export, word, out, *legal)
        legal = (out.dtype,)
        check_rank(export, word, out, 4, 4)
        if out.shape[3] % 16:
            raise ValueError(
                f"{export}: {word}'s last dimension must be a multiple of 16, got {out.shape[3]}"
            )
    (first_word, k), (word, v) = outputs.items()
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{export}: {word} must have the requests, tokens and heads of {first_word}, got "
            f"{[*v.shape]} for {[*k.shape]}"
        )


def check_paged_call(
    export: str,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    hnd: bool,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
) -> None:
    """What the binding refuses but strides and alignment, in its words and its order."""
    caches, factors = _tensors(paged_kv_cache), _tensors(kv_cache_sf)
    names = _names("paged_kv_cache", paged_kv_cache)
    factor_names = _names("kv_cache_sf", kv_cache_sf)
    for name, cache in zip(names, caches):
        check_dtype(export, name, cache, torch.uint8)
    for name, factor in zip(factor_names, factors):
        check_dtype(export, name, factor, torch.float8_e4m3fn, torch.uint8)
    check_outputs(export, caches[0], names[0], outputs)
    pages: tuple[int, int] | None = None
    for i, (word, out) in enumerate(outputs.items()):
        for name, tensor, per_byte in (
            (names[i], caches[i], 2),
            (factor_names[i], factors[i], 16),
        ):
            both = not isinstance(paged_kv_cache if per_byte == 2 else kv_cache_sf, tuple)
            got = _pages(export, name, tensor, both, hnd, word, out, out.shape[3] // per_byte)
            pages = pages or got
            if got != pages:
                raise ValueError(
                    f"{export}: {name} must have {pages[0]} pages of {pages[1]} as {names[0]}, got "
                    f"{got[0]} of {got[1]}"
                )
        number = [*scales][i]
        check_one_number(export, number, scales[number], caches[0], names[0])
    assert pages is not None
    _check_table(export, block_tables, seq_lens, caches[0], names[0], pages[1], outputs)
    for word, out in outputs.items():
        check_elements_apart(export, word, out)
        read = [*zip(names, caches), *zip(factor_names, factors), *scales.items()]
        read += [("block_tables", block_tables), ("seq_lens", seq_lens)]
        for name, tensor in read:
            check_memory_apart(export, word, out, tensor, name)
    (k_word, k), (v_word, v) = outputs.items()
    check_memory_apart(export, v_word, v, k, k_word)


def _pages(
    export: str,
    name: str,
    cache: torch.Tensor,
    both: bool,
    hnd: bool,
    to: str,
    out: torch.Tensor,
    size: int,
) -> tuple[int, int]:
    """Pages and page size of a tensor that holds ``size`` bytes for each head of ``out``."""
    check_same_device(export, name, cache, out, to)
    check_rank(export, name, cache, 3 + both, 4 + both)
    shape = [*cache.shape]
    if both and shape.pop(1) != 2:
        raise ValueError(
            f"{export}: {name} must hold keys and values in dimension 1 of size 2, got shape "
            f"{[*cache.shape]}"
        )
    has_entries = len(shape) == 4
    heads = shape[2 if has_entries and not hnd else 1]
    if (heads, shape[-1]) != (out.shape[2], size):
        raise ValueError(
            f"{export}: {name} must hold rows of {out.shape[2]} x {size} bytes for {to}, got shape "
            f"{[*cache.shape]} in layout {'HND' if hnd else 'NHD'}"
        )
    return shape[0], shape[2 if hnd else 1] if has_entries else 1


def _check_table(
    export: str,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    first: torch.Tensor,
    name: str,
    page_size: int,
    outputs: dict[str, torch.Tensor],
) -> None:
    word, out = next(iter(outputs.items()))
    batch, length = out.shape[:2]
    check_same_device(export, "block_tables", block_tables, first, name)
    check_dtype(export, "block_tables", block_tables, torch.int32, torch.int64)
    if block_tables.dim() != 2 or block_tables.shape[0] != batch:
        raise ValueError(
            f"{export}: block_tables must have shape [{batch}, pages of a request], got "
            f"{[*block_tables.shape]}"
        )
    if block_tables.shape[1] * page_size < length:
        raise ValueError(
            f"{export}: block_tables must have pages of {page_size} entries for the {length} "
            f"tokens of {word}, got {block_tables.shape[1]} pages a request"
        )
    check_same_device(export, "seq_lens", seq_lens, first, name)
    if seq_lens.dtype != torch.int32:
        raise ValueError(f"{export}: seq_lens must be int32, got {dtype_word(seq_lens.dtype)}")
    if seq_lens.shape != (batch,):
        raise ValueError(f"{export}: seq_lens must have shape [{batch}], got {[*seq_lens.shape]}")


def dequantized_pages(
    cache: torch.Tensor,
    factors: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    hnd: bool,
) -> torch.Tensor:
    """``out`` with the numbers of all tokens that have a page, of keys or of values."""
    codes = entries_of(cache, hnd)  # [pages, page_size, heads, head_dim / 2]
    bytes_of_factors = entries_of(factors, hnd).view(torch.uint8)
    pages, page_size = codes.shape[:2]
    position = torch.arange(out.shape[1], device=out.device)
    page = block_tables.long()[:, position // max(page_size, 1)]  # [batch, length]
    kept = (position < seq_lens[:, None]) & (page >= 0) & (page < pages)
    at = page[kept], (position % max(page_size, 1)).expand_as(page)[kept]
    values = bytes_of_factors[at].view(torch.float8_e4m3fn).float()
    elements = e2m1_unpack(codes[at])  # [tokens, heads, head_dim]
    rows = dequantize(elements.flatten(0, 1), values.flatten(0, 1), scale, 16)
    result = out.clone()
    result[kept] = rows.view(elements.shape).to(out.dtype)
    return result


# -- trace ----------------------------------------------------------------------------------------


def fill_pages(call: dict[str, Any]) -> None:
    """Pages in descending order, one of a request that has none, and a request that is shorter."""
    import torch

    cache = call["paged_kv_cache"]
    codes = cache if isinstance(cache, tuple) else (cache,)
    for tensor in codes:
        tensor.copy_(torch.arange(tensor.numel()).mul(37).remainder(256).view(tensor.shape))
    table, lens = call["block_tables"], call["seq_lens"]
    pages = codes[0].shape[0]
    table.copy_((-torch.arange(table.numel()) - 1).remainder(pages).view(table.shape))
    table[-1, 0] = -1
    lens.fill_(call["output_k"].shape[1])
    lens[0] = 1


def paged_trace(
    name: str, description: str, reference: Callable[..., Any]
) -> Callable[..., TraceTemplate]:
    """Templates for each layout, a pair of caches or one, and page size 1."""
    templates: dict[tuple[bool, str], TraceTemplate] = {}
    for packed in (False, True):
        for layout in ("NHD", "HND", "page1"):
            entries = ["page_size"] if layout != "page1" else []
            heads = ["num_heads"]
            inner = heads + entries if layout == "HND" else entries + heads
            parts = ("k",) if packed else ("k", "v")
            axes: dict[str, Var | Const] = {
                "batch_size": Var("Requests."),
                "max_seq_len": Var("Tokens of the longest request."),
                "pages_per_request": Var("Columns of the page table.", sample=9),
                "num_pages": Var("Pages of the cache."),
                "num_heads": Const("h"),
                "*one": Var("Dimensions of a single number.", sample=1),
            }
            if entries:
                axes["page_size"] = Const("ps", sample=16)
            if packed:
                axes["kv"] = Const("", "Keys, values.", value="2")
            inputs: dict[str, Tensor | Scalar] = {}
            for what, word, dtype in (
                ("cache", "packed", "uint8"),
                ("scales", "scale", "float8_e4m3fn"),
            ):
                for item, part in enumerate(parts):
                    dim = f"{part}_{word}_dim"
                    both = ["kv"] if packed else []
                    param = "paged_kv_cache" if what == "cache" else "kv_cache_sf"
                    inputs[param if packed else f"{part}_{what}"] = Tensor(
                        ["num_pages", *both, *inner, dim],
                        param=param,
                        dtype=dtype,
                        item=None if packed else item,
                    )
            for part in parts:
                axes[f"{part}_packed_dim"] = Const("", multiple=8)
                axes[f"{part}_scale_dim"] = Const("", value=f"{part}_packed_dim // 8")
                axes[f"{part}_head_dim"] = Const(f"d{part}", value=f"{part}_packed_dim * 2")
            inputs["block_tables"] = Tensor(["batch_size", "pages_per_request"], dtype="int32")
            inputs["seq_lens"] = Tensor(["batch_size"], dtype="int32")
            outputs: dict[str, Tensor] = {}
            for part in "kv":
                inputs[f"{part}_scale"] = Tensor(["*one"], dtype="float32")
            for part in "kv":
                dim = f"{'k' if packed else part}_head_dim"
                of = ["batch_size", "max_seq_len", "num_heads", dim]
                inputs[f"output_{part}"] = Tensor(of)
                outputs[f"output_{part}_out"] = Tensor(
                    of, param=f"output_{part}", dtype_from=f"output_{part}"
                )
            suffix = {"HND": "_hnd", "page1": "_page1"}.get(layout, "")
            templates[packed, layout] = TraceTemplate(
                op_type="quantization",
                name_prefix=name + ("_packed" if packed else "") + suffix,
                description=description,
                axes=axes,
                inputs=inputs,
                outputs=outputs,
                reference=reference,
                fixed={"kv_layout": "HND"} if layout == "HND" else None,
                fill=fill_pages,
            )

    return by_layout(templates)
