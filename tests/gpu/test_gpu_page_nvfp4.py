# SPDX-License-Identifier: Apache-2.0
"""Appending to a paged KV cache in NVFP4: the bits of the reference, and no others touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from page_cases import FORMS, LAYOUTS, PagedCache, keys_and_values, kv_cache, tokens_for

import precast
from precast.quantization import nvfp4_kv_quantize_reference

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=["f16", "bf16"])
TABLE = precast.nvfp4_quantize_append_paged_kv_cache
SLOTS = precast.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping


def quantized(rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Codes and scales by the reference on the CPU."""
    made = nvfp4_kv_quantize_reference(rows.cpu(), torch.tensor([scale]))
    return tuple(t.to(rows.device) for t in made)


def normal(rows: Any, generator: torch.Generator) -> Any:
    """The same memory with normal numbers, of which blocks differ in size."""
    for row in rows:
        x = torch.randn(row.shape, device=row.device, generator=generator)
        powers = torch.randn((*row.shape[:-1], 1), device=row.device, generator=generator)
        row.copy_(x * torch.exp2(2 * powers.round()))
    return rows


def check_both_ways(
    codes: PagedCache,
    factors: PagedCache,
    rows: Any,
    tokens: Any,
    layout: str,
    scales: tuple[float, float] = (0.02, 0.37),
    given: Any = None,
) -> None:
    """By page table, then by slots."""
    given = scales if given is None else given
    kept = [quantized(row[: tokens.kept.numel()], s) for row, s in zip(rows, scales)]
    caches = codes.argument, factors.argument
    for name, call in (
        ("table", lambda: TABLE(*rows, *tokens.places, *caches, *tokens.table, *given, layout)),
        ("slots", lambda: SLOTS(*rows, tokens.slots, *caches, *given, layout)),
    ):
        before = codes.before(), factors.before()
        call()
        for i, cache in enumerate((codes, factors)):
            want = [made[i][tokens.kept] for made in kept]
            if i == 1:
                want = [w.view(cache.halves[0].dtype) for w in want]
            cache.check(before[i], want, tokens.page, tokens.entry, f"{name}: {'cs'[i]}")


@dtypes
@pytest.mark.parametrize("form", FORMS)
@by_layout
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_page_sizes(
    page_size: int, layout: str, form: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    pages = max(9, 300 // page_size)
    codes = kv_cache(form, layout, (pages, page_size, 4, 64), torch.uint8, generator)
    factors = kv_cache("packed", layout, (pages, page_size, 4, 8), E4M3, generator)
    for count in (1, 61, 257):
        tokens = tokens_for(count, pages, page_size, generator)
        rows = normal(keys_and_values(count, 4, 128, dtype, generator, "contiguous"), generator)
        check_both_ways(codes, factors, rows, tokens, layout)


@dtypes
@by_layout
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("dim", [16, 48, 64, 128, 192, 256, 576])
def test_row_sizes(
    dim: int, heads: int, layout: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    tokens = tokens_for(77, 11, 16, generator)
    codes = kv_cache("slices", layout, (11, 16, heads, dim // 2), torch.uint8, generator)
    factors = kv_cache("pair", layout, (11, 16, heads, dim // 16), torch.uint8, generator)
    for form in ("contiguous", "packed qkv", "odd addresses"):
        rows = normal(keys_and_values(77, heads, dim, dtype, generator, form), generator)
        check_both_ways(codes, factors, rows, tokens, layout)


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_addresses(form: str, offset: int, generator: torch.Generator) -> None:
    codes = kv_cache(form, "NHD", (13, 8, 3, 40), torch.uint8, generator, offset)
    factors = kv_cache(form, "NHD", (13, 8, 3, 5), E4M3, generator, offset)
    tokens = tokens_for(50, 13, 8, generator)
    rows = normal(keys_and_values(50, 3, 80, BF16, generator, "contiguous"), generator)
    check_both_ways(codes, factors, rows, tokens, "NHD")


@by_layout
def test_codes_and_scales_in_one_row(layout: str, generator: torch.Generator) -> None:
    """As an engine has it that keeps an entry in one piece of memory."""
    whole = kv_cache("pair", layout, (11, 16, 4, 72), torch.uint8, generator)
    cuts = [[half[..., :64], half[..., 64:]] for half in whole.halves]
    codes, factors = (
        tuple(part[..., :64] for part in whole.argument),
        tuple(part[..., 64:].view(E4M3) for part in whole.argument),
    )
    tokens = tokens_for(90, 11, 16, generator)
    rows = normal(keys_and_values(90, 4, 128, BF16, generator, "contiguous"), generator)
    made = [quantized(row, s) for row, s in zip(rows, (0.02, 0.37))]
    want = [torch.cat(both, -1)[tokens.kept] for both in made]
    assert cuts[0][0].shape[-1] + cuts[0][1].shape[-1] == want[0].shape[-1]
    for call in (
        lambda: TABLE(*rows, *tokens.places, codes, factors, *tokens.table, 0.02, 0.37, layout),
        lambda: SLOTS(*rows, tokens.slots, codes, factors, 0.02, 0.37, layout),
    ):
        before = whole.before()
        call()
        whole.check(before, want, tokens.page, tokens.entry, "one row")


@by_layout
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_index_types_and_scales_on_the_gpu(
    index: torch.dtype, layout: str, generator: torch.Generator
) -> None:
    codes = kv_cache("packed", layout, (31, 16, 8, 64), torch.uint8, generator)
    factors = kv_cache("packed", layout, (31, 16, 8, 8), E4M3, generator)
    tokens = tokens_for(400, 31, 16, generator, index=index)
    rows = normal(keys_and_values(400, 8, 128, BF16, generator, "contiguous"), generator)
    given = [torch.tensor([s], device="cuda") for s in (0.02, 0.37)]
    check_both_ways(codes, factors, rows, tokens, layout, given=given)
    given = [given[0].view(()), 0.37]
    check_both_ways(codes, factors, rows, tokens, layout, given=given)


@by_layout
def test_other_value_dimension(layout: str, generator: torch.Generator) -> None:
    dims = (192, 128)
    caches = [
        [kv_cache("pair", layout, (9, 16, 4, dim // n), dtype, generator) for dim in dims]
        for n, dtype in ((2, torch.uint8), (16, E4M3))
    ]
    codes, factors = (
        PagedCache(
            tuple(c.argument[0] for c in both),
            tuple(c.halves[0] for c in both),  # type: ignore[arg-type]
            tuple(c.buffers[0] for c in both),
        )
        for both in caches
    )
    rows = [keys_and_values(77, 4, dim, BF16, generator, "contiguous")[0] for dim in dims]
    check_both_ways(
        codes, factors, normal(rows, generator), tokens_for(77, 9, 16, generator), layout
    )


@dtypes
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 3e-3, 1.0, 117.0, 1e30, 3e38])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_number(
    as_tensor: bool, scale: float, dtype: torch.dtype, generator: torch.Generator
) -> None:
    every = torch.arange(65536, device="cuda").sub(32768).to(torch.int16).view(dtype)
    alone = every.view(256, 4, 64)
    with_ones = torch.ones(65536, 1, 16, dtype=dtype, device="cuda")
    with_ones[:, 0, 5] = every
    scales = (scale, 0.7 * scale)
    given = [torch.tensor([s], device="cuda") for s in scales] if as_tensor else scales
    for rows in (alone, with_ones):
        count, heads, dim = rows.shape
        pages = count // 16 + 2
        codes = kv_cache("packed", "NHD", (pages, 16, heads, dim // 2), torch.uint8, generator)
        factors = kv_cache("packed", "NHD", (pages, 16, heads, dim // 16), torch.uint8, generator)
        tokens = tokens_for(count, pages, 16, generator)
        check_both_ways(codes, factors, (rows, rows), tokens, "NHD", scales, given)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_scales_on_the_gpu_that_are_none(scale: float, generator: torch.Generator) -> None:
    """Nothing stops: what the formula gives is written, and nothing else."""
    codes = kv_cache("packed", "NHD", (9, 16, 4, 32), torch.uint8, generator)
    factors = kv_cache("packed", "NHD", (9, 16, 4, 4), torch.uint8, generator)
    tokens = tokens_for(60, 9, 16, generator)
    rows = normal(keys_and_values(60, 4, 64, BF16, generator, "contiguous"), generator)
    given = torch.full((1,), scale, device="cuda")
    made = [quantized(row, scale) for row in rows]
    before = codes.before(), factors.before()
    SLOTS(*rows, tokens.slots, codes.argument, factors.argument, given, given)
    torch.cuda.synchronize()
    for half in factors.halves:  # The sign of a NaN is nobody's business.
        at = tokens.page, tokens.entry
        half[at] = torch.where(half[at] & 0x7F == 0x7F, half[at] & 0x7F, half[at])
    scales = [torch.where(m[1] & 0x7F == 0x7F, m[1] & 0x7F, m[1]) for m in made]
    for i, cache in enumerate((codes, factors)):
        want = [(scales[j] if i else made[j][0])[tokens.kept] for j in range(2)]
        cache.check(before[i], want, tokens.page, tokens.entry, f"{scale}: {'cs'[i]}")


@pytest.mark.parametrize("count", [1, 2, 64, 1000, 16384])
@pytest.mark.parametrize("enable_pdl", [False, True])
def test_token_counts(count: int, enable_pdl: bool, generator: torch.Generator) -> None:
    codes = kv_cache("packed", "HND", (1100, 16, 8, 64), torch.uint8, generator)
    factors = kv_cache("packed", "HND", (1100, 16, 8, 8), E4M3, generator)
    tokens = tokens_for(count, 1100, 16, generator)
    rows = normal(keys_and_values(count, 8, 128, BF16, generator, "contiguous"), generator)
    made = [quantized(row, 0.02) for row in rows]
    before = codes.before(), factors.before()
    SLOTS(*rows, tokens.slots, codes.argument, factors.argument, 0.02, 0.02, "HND", enable_pdl)
    codes.check(before[0], [m[0][tokens.kept] for m in made], tokens.page, tokens.entry, "codes")
    want = [m[1][tokens.kept].view(E4M3) for m in made]
    factors.check(before[1], want, tokens.page, tokens.entry, "scales")


def test_slots_for_fewer_tokens_and_for_none(generator: torch.Generator) -> None:
    codes = kv_cache("packed", "NHD", (9, 16, 4, 32), torch.uint8, generator)
    factors = kv_cache("packed", "NHD", (9, 16, 4, 4), E4M3, generator)
    rows = normal(keys_and_values(64, 4, 64, BF16, generator, "contiguous"), generator)
    for count in (41, 0):
        tokens = tokens_for(count, 9, 16, generator, lost=False)
        made = [quantized(row[:count], 0.02) for row in rows]
        before = codes.before(), factors.before()
        SLOTS(*rows, tokens.slots, codes.argument, factors.argument, 0.02, 0.02)
        codes.check(before[0], [m[0] for m in made], tokens.page, tokens.entry, "codes")
        want = [m[1].view(E4M3) for m in made]
        factors.check(before[1], want, tokens.page, tokens.entry, "scales")


def test_what_is_dequantised_is_what_was_appended(generator: torch.Generator) -> None:
    rows = torch.randn(2, 33, 4, 128, device="cuda", generator=generator).to(BF16)
    g = (rows.float().abs().amax() / (448 * 6)).reshape(1)
    cache = torch.zeros(5, 2, 16, 4, 64, dtype=torch.uint8, device="cuda")
    factors = torch.zeros(5, 2, 16, 4, 8, dtype=torch.uint8, device="cuda")
    table = torch.tensor([[3, 0, 4]], device="cuda")
    at = torch.arange(33, device="cuda")
    SLOTS(*rows, table[0][at // 16] * 16 + at % 16, cache, factors, g, g)
    out = torch.zeros(2, 1, 33, 4, 128, dtype=BF16, device="cuda")
    lens = torch.tensor([33], dtype=torch.int32, device="cuda")
    precast.nvfp4_kv_dequantize_paged(cache, factors, table, lens, g, g, *out)
    biggest = rows.float().unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    assert ((out[:, 0].float() - rows.float()).abs() <= biggest * 0.19).all()


# -- what engines do ------------------------------------------------------------------------------


def call_of(generator: torch.Generator) -> tuple[Any, ...]:
    codes = kv_cache("packed", "NHD", (31, 16, 8, 64), torch.uint8, generator)
    factors = kv_cache("packed", "NHD", (31, 16, 8, 8), E4M3, generator)
    tokens = tokens_for(96, 31, 16, generator)
    rows = normal(keys_and_values(96, 8, 128, BF16, generator, "contiguous"), generator)
    return codes, factors, tokens, rows, torch.full((1,), 0.02, device="cuda")


def test_a_captured_step_follows_its_indices_and_scales(generator: torch.Generator) -> None:
    codes, factors, fixed, rows, scale = call_of(generator)

    def step() -> None:
        caches = codes.argument, factors.argument
        TABLE(*rows, *fixed.places, *caches, *fixed.table, scale, scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for value in (0.5, 0.03, 0.001):
        tokens = tokens_for(96, 31, 16, generator)
        for name, tensor in tokens.named().items():
            getattr(fixed, name).copy_(tensor)
        normal(rows, generator)
        scale.fill_(value)
        made = [quantized(row, value) for row in rows]
        before = codes.before(), factors.before()
        graph.replay()
        where = tokens.page, tokens.entry
        codes.check(before[0], [m[0][tokens.kept] for m in made], *where, "replay: codes")
        want = [m[1][tokens.kept].view(E4M3) for m in made]
        factors.check(before[1], want, *where, "replay: scales")


@pytest.mark.parametrize("form", ["pair", "packed"])
def test_torch_compile(form: str, generator: torch.Generator) -> None:
    codes = kv_cache(form, "NHD", (31, 16, 8, 64), torch.uint8, generator)
    factors = kv_cache(form, "NHD", (31, 16, 8, 8), E4M3, generator)
    scale = torch.full((1,), 0.02, device="cuda")
    parts = [c.argument if form == "pair" else (c.argument,) for c in (codes, factors)]

    def block(key: Any, value: Any, slots: Any, scale: Any, codes: Any, factors: Any) -> Any:
        caches = (part if len(part) == 2 else part[0] for part in (codes, factors))
        SLOTS(key * 2, value, slots, *caches, scale, 0.02)
        return key + 1

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    for count in (40, 41):
        tokens = tokens_for(count, 31, 16, generator)
        rows = normal(keys_and_values(count, 8, 128, BF16, generator, "contiguous"), generator)
        made = [quantized(row, 0.02) for row in (rows[0] * 2, rows[1])]
        before = codes.before(), factors.before()
        compiled(*rows, tokens.slots, scale, *parts)
        where = tokens.page, tokens.entry
        codes.check(before[0], [m[0][tokens.kept] for m in made], *where, "compiled: codes")
        want = [m[1][tokens.kept].view(E4M3) for m in made]
        factors.check(before[1], want, *where, "compiled: scales")


def test_no_synchronisation_and_no_allocation(generator: torch.Generator) -> None:
    codes, factors, tokens, rows, scale = call_of(generator)
    caches = codes.argument, factors.argument
    calls = (
        lambda: TABLE(*rows, *tokens.places, *caches, *tokens.table, scale, 0.02),
        lambda: SLOTS(*rows, tokens.slots, *caches, 0.02, scale),
    )
    for call in calls:
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_errors_name_their_tensor_and_write_nothing(generator: torch.Generator) -> None:
    codes, factors, tokens, rows, scale = call_of(generator)
    k, v = rows
    cache, sf = codes.argument, factors.argument
    before = codes.before(), factors.before()
    good = {
        "append_key": k,
        "append_value": v,
        "slot_mapping": tokens.slots,
        "paged_kv_cache": cache,
        "kv_cache_sf": sf,
        "k_scale": 1.0,
        "v_scale": scale,
    }
    bad: list[tuple[str, dict[str, Any]]] = [
        ("append_key must be a CUDA tensor", {"append_key": k.cpu()}),
        ("kv_cache_sf must be on cuda:0 as append_key", {"kv_cache_sf": sf.cpu()}),
        ("k_scale must be on cuda:0", {"k_scale": scale.cpu()}),
        ("v_scale must hold one number", {"v_scale": scale.repeat(2)}),
        ("k_scale must be positive and finite as float32", {"k_scale": 0.0}),
        ("v_scale must be positive and finite as float32", {"v_scale": -1.0}),
        ("paged_kv_cache must be uint8, got float8_e4m3fn", {"paged_kv_cache": cache.view(E4M3)}),
        ("kv_cache_sf must be float8_e4m3fn or uint8", {"kv_cache_sf": sf.float()}),
        (
            "paged_kv_cache must hold rows of 8 x 64 bytes for append_key",
            {"paged_kv_cache": cache[..., 1:]},
        ),
        ("kv_cache_sf must hold rows of 8 x 8 bytes for append_key", {"kv_cache_sf": sf[..., 1:]}),
        (
            "kv_cache_sf must have 31 pages of 16 as paged_kv_cache, got 30 of 16",
            {"kv_cache_sf": sf[:30]},
        ),
        (
            "append_key's last dimension must be a multiple of 16, got 120",
            {"append_key": k[..., :120], "append_value": v[..., :120]},
        ),
        ("memory; call .clone", {"kv_cache_sf": cache[..., :8]}),
    ]
    for words, arguments in bad:
        with pytest.raises(ValueError, match=words):
            SLOTS(**{**good, **arguments})
    for part, old in zip((codes, factors), before):
        for mine, theirs in zip(part.before(), old, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(generator: torch.Generator) -> None:
    codes, factors, tokens, rows, _ = call_of(generator)
    caches = codes.argument.to("cuda:1"), factors.argument.view(torch.uint8).to("cuda:1")
    SLOTS(*(r.to("cuda:1") for r in rows), tokens.slots.to("cuda:1"), *caches, 0.02, 0.02)
    assert torch.cuda.current_device() == 0
    SLOTS(*rows, tokens.slots, codes.argument, factors.argument, 0.02, 0.02)
    assert torch.equal(caches[0].to("cuda:0"), codes.argument)
    assert torch.equal(caches[1].to("cuda:0"), factors.argument.view(torch.uint8))
