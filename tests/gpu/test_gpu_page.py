# SPDX-License-Identifier: Apache-2.0
"""Appending to a paged KV cache against torch's indexing: layouts, types, strides, sizes."""

from __future__ import annotations

import math
from typing import Any

import page_cases
import pytest
import torch
from code_params import FP8
from page_cases import (
    FORMS,
    LAYOUTS,
    as_bits,
    keys_and_values,
    kv_cache,
    mla_cache,
    random_bits,
    tokens_for,
)

import precast

BF16 = torch.bfloat16
DTYPES = [torch.float16, BF16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
by_form = pytest.mark.parametrize("form", FORMS)
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


def check_both_ways(cache: Any, rows: Any, tokens: Any, layout: str) -> None:
    """By page table, then by slots; the same memory each time."""
    kept = [row[: tokens.kept.numel()][tokens.kept] for row in rows]
    where = kept, tokens.page, tokens.entry
    before = cache.before()
    precast.append_paged_kv_cache(
        *rows, *tokens.places, cache.argument, *tokens.table, kv_layout=layout
    )
    cache.check(before, *where, "append_paged_kv_cache")
    before = cache.before()
    precast.append_paged_kv_cache_with_slot_mapping(*rows, tokens.slots, cache.argument, layout)
    cache.check(before, *where, "append_paged_kv_cache_with_slot_mapping")


@by_dtype
@by_form
@by_layout
@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 64, 128])
def test_page_sizes(
    page_size: int, layout: str, form: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    pages = max(9, 300 // page_size)
    cache = kv_cache(form, layout, (pages, page_size, 4, 64), dtype, generator)
    for count in (1, 61, 257):
        tokens = tokens_for(count, pages, page_size, generator)
        check_both_ways(
            cache, keys_and_values(count, 4, 64, dtype, generator, "contiguous"), tokens, layout
        )


@by_dtype
@by_layout
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("dim", [1, 33, 64, 80, 100, 128, 256, 576])
def test_row_sizes(
    dim: int, heads: int, layout: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Rows of any size, in each unit that a copy may have."""
    tokens = tokens_for(77, 11, 16, generator)
    for form in ("packed", "slices"):
        cache = kv_cache(form, layout, (11, 16, heads, dim), dtype, generator)
        for rows in ("contiguous", "packed qkv"):
            made = keys_and_values(77, heads, dim, dtype, generator, rows)
            check_both_ways(cache, made, tokens, layout)


@by_dtype
@by_form
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_addresses(offset: int, form: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    cache = kv_cache(form, "NHD", (13, 8, 4, 64), dtype, generator, offset)
    tokens = tokens_for(50, 13, 8, generator)
    for rows in ("contiguous", "odd addresses"):
        made = keys_and_values(50, 4, 64, dtype, generator, rows)
        check_both_ways(cache, made, tokens, "NHD")


@by_layout
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_index_types(index: torch.dtype, layout: str, generator: torch.Generator) -> None:
    cache = kv_cache("packed", layout, (31, 16, 8, 128), BF16, generator)
    tokens = tokens_for(400, 31, 16, generator, index=index)
    check_both_ways(
        cache, keys_and_values(400, 8, 128, BF16, generator, "contiguous"), tokens, layout
    )


def test_mixed_index_types(generator: torch.Generator) -> None:
    cache = kv_cache("packed", "NHD", (31, 16, 8, 128), BF16, generator)
    rows = keys_and_values(90, 8, 128, BF16, generator, "contiguous")
    tokens = tokens_for(90, 31, 16, generator)
    for wide in tokens.named():
        mixed = {n: t.long() if n == wide else t for n, t in tokens.named().items()}
        before = cache.before()
        precast.append_paged_kv_cache(*rows, **mixed, paged_kv_cache=cache.argument)
        kept = [row[tokens.kept] for row in rows]
        cache.check(before, kept, tokens.page, tokens.entry, f"{wide} is int64")


@pytest.mark.parametrize("count", [1, 2, 64, 256, 1000, 16384])
def test_token_counts(count: int, generator: torch.Generator) -> None:
    """Decode batches and prefills, with the CTA sizes of both."""
    cache = kv_cache("packed", "NHD", (1100, 16, 8, 128), BF16, generator)
    tokens = tokens_for(count, 1100, 16, generator)
    rows = keys_and_values(count, 8, 128, BF16, generator, "contiguous")
    for enable_pdl in (True, False):
        before = cache.before()
        precast.append_paged_kv_cache(
            *rows, *tokens.places, cache.argument, *tokens.table, enable_pdl=enable_pdl
        )
        cache.check(before, [r[tokens.kept] for r in rows], tokens.page, tokens.entry, "append")


@by_layout
def test_other_value_dimension(layout: str, generator: torch.Generator) -> None:
    """Keys of 192 and values of 128, as DeepSeek's prefill has them, and the other way round."""
    # The last with enough tokens to take rows by halves.
    for dims, count, pages in (((192, 128), 77, 9), ((40, 264), 77, 9), ((192, 128), 1001, 70)):
        caches = [kv_cache("pair", layout, (pages, 16, 4, dim), BF16, generator) for dim in dims]
        parts = tuple(cache.argument[0] for cache in caches)
        halves = tuple(cache.halves[0] for cache in caches)
        cache = page_cases.PagedCache(parts, halves, tuple(c.buffers[0] for c in caches))
        rows = [keys_and_values(count, 4, dim, BF16, generator, "contiguous")[0] for dim in dims]
        check_both_ways(cache, rows, tokens_for(count, pages, 16, generator), layout)


@by_layout
@pytest.mark.parametrize("packed", [False, True])
def test_page_size_one_without_its_dimension(
    packed: bool, layout: str, generator: torch.Generator
) -> None:
    shape = (200, 2, 8, 64) if packed else (2, 200, 8, 64)
    whole = random_bits(*shape, dtype=BF16, generator=generator)
    parts = whole.unbind(1 if packed else 0)
    halves = tuple(part.unsqueeze(1) for part in parts)
    cache = page_cases.PagedCache(whole if packed else parts, halves, (whole,))  # type: ignore[arg-type]
    rows = keys_and_values(99, 8, 64, BF16, generator, "contiguous")
    check_both_ways(cache, rows, tokens_for(99, 200, 1, generator), layout)


@pytest.mark.parametrize("dtype", FP8)
def test_bytes_without_a_type(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Engines keep fp8 caches as uint8."""
    cache = kv_cache("packed", "NHD", (9, 16, 4, 64), torch.uint8, generator)
    rows = keys_and_values(60, 4, 64, dtype, generator, "contiguous")
    check_both_ways(cache, rows, tokens_for(60, 9, 16, generator), "NHD")


def test_slots_for_fewer_tokens(generator: torch.Generator) -> None:
    cache = kv_cache("packed", "NHD", (9, 16, 4, 64), BF16, generator)
    rows = keys_and_values(64, 4, 64, BF16, generator, "contiguous")
    tokens = tokens_for(41, 9, 16, generator, lost=False)
    before = cache.before()
    precast.append_paged_kv_cache_with_slot_mapping(*rows, tokens.slots, cache.argument)
    cache.check(before, [r[:41] for r in rows], tokens.page, tokens.entry, "fewer slots")


@by_dtype
@pytest.mark.parametrize("one_buffer", [False, True])
@pytest.mark.parametrize("dims", [(512, 64), (256, 64), (64, 512), (24, 7)])
def test_mla(
    dims: tuple[int, int], one_buffer: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for page_size in (1, 16, 64):
        cache = mla_cache(one_buffer, (23, page_size), dims, dtype, generator)
        count = min(150, 23 * page_size)
        rows = [random_bits(count, dim, dtype=dtype, generator=generator) for dim in dims]
        wide = random_bits(count, sum(dims), dtype=dtype, generator=generator)
        for made in (rows, wide.split(dims, -1)):
            tokens = tokens_for(count, 23, page_size, generator)
            where = [r[tokens.kept] for r in made], tokens.page, tokens.entry
            before = cache.before()
            precast.append_paged_mla_kv_cache(*made, *tokens.places, *cache.argument, *tokens.table)
            cache.check(before, *where, "append_paged_mla_kv_cache")
            before = cache.before()
            precast.append_paged_mla_kv_cache_with_slot_mapping(
                *made, tokens.slots, *cache.argument
            )
            cache.check(before, *where, "append_paged_mla_kv_cache_with_slot_mapping")


@by_dtype
@pytest.mark.parametrize("one_buffer", [False, True])
@pytest.mark.parametrize("dims", [(512, 64), (24, 7), (40, 576), (1, 40)])
def test_mla_of_many_tokens(
    dims: tuple[int, int], one_buffer: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Enough to take rows by halves, of an odd number of units too."""
    cache = mla_cache(one_buffer, (601, 16), dims, dtype, generator)
    tokens = tokens_for(9001, 601, 16, generator)
    rows = [random_bits(9001, dim, dtype=dtype, generator=generator) for dim in dims]
    where = [row[tokens.kept] for row in rows], tokens.page, tokens.entry
    before = cache.before()
    precast.append_paged_mla_kv_cache(*rows, *tokens.places, *cache.argument, *tokens.table)
    cache.check(before, *where, "append_paged_mla_kv_cache")
    before = cache.before()
    precast.append_paged_mla_kv_cache_with_slot_mapping(*rows, tokens.slots, *cache.argument)
    cache.check(before, *where, "append_paged_mla_kv_cache_with_slot_mapping")


# -- fp8 ------------------------------------------------------------------------------------------


def quantized(rows: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """In float64 up to the quotient's rounding to fp32, which is harmless after it."""
    most = torch.finfo(dtype).max
    divisor = float(torch.tensor(scale, dtype=torch.float32))
    quotient = (rows.double() / divisor).float()
    return quotient.clamp(-most, most).to(dtype)


def all_halves(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every number of 16 bits as ``[256, 4, 64]``; NaN with one sign, whose bits fp8 keeps."""
    every = torch.arange(65536, device=generator.device).sub(32768).to(torch.int16).view(dtype)
    return torch.where(every.isnan(), every.abs(), every).view(256, 4, 64)


#: Not what the op is for, but a quotient all the same.
NO_SCALES = (0.0, -0.0, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("kv", FP8)
@by_layout
@pytest.mark.parametrize(
    "scale",
    [1.0, 0.37, 3e-3, 117.0, 1e-30, 1e-40, 3e33, -0.05, float.fromhex("0x1.fffffep-4"), *NO_SCALES],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_fp8_of_every_number(
    as_tensor: bool,
    scale: float,
    layout: str,
    kv: torch.dtype,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    rows = all_halves(dtype, generator)
    scales = scale, 2.5 * scale
    given: Any = scales
    if as_tensor:
        given = [torch.tensor([s], device=rows.device) for s in scales]
    cache = kv_cache("packed", layout, (33, 8, 4, 64), kv, generator)
    tokens = tokens_for(256, 33, 8, generator)
    want = [quantized(rows, s, kv)[tokens.kept] for s in scales]
    before = cache.before()
    precast.fp8_quantize_append_paged_kv_cache_with_slot_mapping(
        rows, rows, tokens.slots, cache.argument, *given, kv_layout=layout
    )
    # The sign of a NaN is nobody's business.
    for half in cache.halves:
        got = half[tokens.page, tokens.entry]
        as_bits(got)[got.float().isnan()] &= 0x7F
        as_bits(half)[tokens.page, tokens.entry] = as_bits(got)
    for row in want:
        as_bits(row)[row.float().isnan()] &= 0x7F
    cache.check(before, want, tokens.page, tokens.entry, "fp8")


@pytest.mark.parametrize("kv", FP8)
@by_form
@pytest.mark.parametrize("dim", [7, 33, 64, 72, 128])
@pytest.mark.parametrize("form_of_rows", ["contiguous", "packed qkv", "odd addresses"])
def test_fp8_rows_and_addresses(
    form_of_rows: str, dim: int, form: str, kv: torch.dtype, generator: torch.Generator
) -> None:
    cache = kv_cache(form, "NHD", (17, 8, 3, dim), kv, generator, offset=dim % 2)
    made = keys_and_values(100, 3, dim, BF16, generator, form_of_rows)
    for row in made:
        row.copy_(torch.randn(row.shape, device=row.device, generator=generator) * 50)
    tokens = tokens_for(100, 17, 8, generator)
    want = [quantized(r, s, kv)[tokens.kept] for r, s in zip(made, (0.3, 0.11))]
    before = cache.before()
    precast.fp8_quantize_append_paged_kv_cache_with_slot_mapping(
        *made, tokens.slots, cache.argument, 0.3, 0.11
    )
    cache.check(before, want, tokens.page, tokens.entry, "fp8")


@pytest.mark.parametrize("one_buffer", [False, True])
@pytest.mark.parametrize("kv", FP8)
def test_fp8_of_mla(one_buffer: bool, kv: torch.dtype, generator: torch.Generator) -> None:
    cache = mla_cache(one_buffer, (23, 64), (512, 64), kv, generator)
    rows = [
        torch.randn(200, dim, device=generator.device, generator=generator).to(BF16)
        for dim in (512, 64)
    ]
    tokens = tokens_for(200, 23, 64, generator, index=torch.int64)
    scale = torch.tensor(0.05, device=generator.device)
    want = [quantized(r, 0.05, kv)[tokens.kept] for r in rows]
    before = cache.before()
    precast.fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping(
        *rows, tokens.slots, *cache.argument, scale
    )
    cache.check(before, want, tokens.page, tokens.entry, "fp8 of MLA")


# -- positions, concat ----------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch", [1, 2, 63, 256, 4095, 4096, 20000])
def test_batch_indices_positions(
    batch: int, index: torch.dtype, generator: torch.Generator
) -> None:
    device = generator.device
    lengths = torch.randint(0, 6, (batch,), device=device, generator=generator)
    seq_lens = lengths + torch.randint(0, 999, (batch,), device=device, generator=generator)
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    used = int(indptr[-1])
    every = torch.arange(batch, device=device)
    want_batch = torch.repeat_interleave(every, lengths)
    within = torch.arange(used, device=device) - indptr[want_batch]
    want_position = (seq_lens - lengths)[want_batch] + within
    for nnz in (used, used + 300, used // 2):
        want = [w[:nnz].int() for w in (want_batch, want_position)]
        pad = nnz - want[0].numel()
        want = [torch.cat([w, w.new_full((pad,), f)]) for w, f in zip(want, (-1, 0))]
        out = [torch.full((nnz,), 77, dtype=torch.int32, device=device) for _ in range(2)]
        for given in ([], out):
            got = precast.get_batch_indices_positions(
                indptr.to(index), seq_lens.to(index), nnz, *given
            )
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("batch", [2, 4096])
def test_batch_indices_of_ends_beyond_32_bits(batch: int, generator: torch.Generator) -> None:
    """The request of the last rows goes on behind them; both ways to search."""
    device = generator.device
    indptr = torch.full((batch + 1,), 2**33, device=device)
    indptr[:3] = torch.tensor([0, 3, 2**31 + 10], device=device)
    seq_lens = torch.full((batch,), 2**33, device=device)
    seq_lens[:2] = torch.tensor([5, 2**31 + 20], device=device)
    got = precast.get_batch_indices_positions(indptr, seq_lens, 8)
    assert got[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert got[1].tolist() == [2, 3, 4, 13, 14, 15, 16, 17]


def test_batch_indices_of_nothing(generator: torch.Generator) -> None:
    zero = torch.zeros(1, dtype=torch.int32, device=generator.device)
    none = zero[:0]
    assert precast.get_batch_indices_positions(zero, none, 0)[0].numel() == 0
    got = precast.get_batch_indices_positions(zero, none, 5)
    assert [t.tolist() for t in got] == [[-1] * 5, [0] * 5]


@by_dtype
@pytest.mark.parametrize(
    "sizes",
    [
        (77, 128, 128, 64),
        (1, 128, 128, 64),
        (347, 128, 128, 64),
        (33, 16, 64, 64),
        (9, 5, 40, 24),
        (9, 3, 7, 5),
    ],
)
@pytest.mark.parametrize("gap", [0, 1, 64])
def test_concat_mla_k(
    gap: int, sizes: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    count, heads, nope, rope = sizes

    def make(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = random_bits(*shape[:-1], shape[-1] + gap, dtype=dtype, generator=generator)
        return buffer, buffer[..., : shape[-1]]

    buffer, k = make(count, heads, nope + rope)
    parts = make(count, heads, nope)[1], make(count, 1, rope)[1]
    want = as_bits(buffer).clone()
    want[..., :nope] = as_bits(parts[0])
    want[..., nope : nope + rope] = as_bits(parts[1])
    precast.concat_mla_k(k, *parts)
    assert torch.equal(as_bits(buffer), want)


def test_empty(generator: torch.Generator) -> None:
    cache = kv_cache("packed", "NHD", (9, 16, 4, 64), BF16, generator)
    before = cache.before()
    rows = keys_and_values(0, 4, 64, BF16, generator, "contiguous")
    tokens = tokens_for(0, 9, 16, generator)
    precast.append_paged_kv_cache(*rows, *tokens.places, cache.argument, *tokens.table)
    precast.append_paged_kv_cache_with_slot_mapping(*rows, tokens.slots, cache.argument)
    full = keys_and_values(5, 4, 64, BF16, generator, "contiguous")
    slots = torch.zeros(5, dtype=torch.int32, device=generator.device)
    nothing = cache.argument[:0]
    precast.append_paged_kv_cache_with_slot_mapping(*full, slots, nothing)
    for buffer, old in zip(cache.buffers, before, strict=True):
        assert torch.equal(as_bits(buffer), old)
    k = torch.empty(0, 128, 192, device=generator.device)
    precast.concat_mla_k(k, k[..., :128].clone(), k[:, :1, 128:].clone())
