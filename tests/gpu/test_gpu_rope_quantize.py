# SPDX-License-Identifier: Apache-2.0
"""RoPE with quantisation to fp8, also into a paged cache, against its formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from code_params import FP8
from rope_case import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    assert_fp8_close,
    exact_rope,
    heads_in,
    make_cache,
    phases_of_cache,
    same_bits,
)

import precast

E4M3 = torch.float8_e4m3fn
every_fp8 = pytest.mark.parametrize("fp8", FP8)
both_kinds = pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])
CACHE_ROWS = 70
Parts = list[torch.Tensor]


def draw_positions(tokens: int, generator: torch.Generator) -> torch.Tensor:
    ids = torch.randint(CACHE_ROWS, (tokens,), generator=generator, device=generator.device)
    return ids.to(DEVICE)


def draw_parts(
    layout: str,
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    mla: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Parts:
    """q_rope, k_rope, q_nope, k_nope; the two parts of a head share its memory."""
    parts = []
    for count in heads:
        (x,) = heads_in(layout, tokens, (count,), sum(dims), dtype=dtype, generator=generator)
        x = x[:, 0] if mla and len(parts) else x
        parts.append((x[..., : dims[0]], x[..., dims[0] :]))
    return [parts[0][0], parts[1][0], parts[0][1], parts[1][1]]


def wanted(
    parts: Parts,
    ids: torch.Tensor,
    cache: torch.Tensor,
    interleave: bool,
    scales: tuple[float, float],
) -> Parts:
    phase = phases_of_cache(ids, cache)
    exact = []
    for i, x in enumerate(parts):
        heads = x if x.dim() == 3 else x.unsqueeze(1)
        result = exact_rope(heads, phase, interleave) if i < 2 else heads.double()
        exact.append((result * scales[i % 2]).view(x.shape))
    return exact


def run(
    function: Callable[..., Any],
    parts: Parts,
    ids: torch.Tensor,
    cache: torch.Tensor,
    interleave: bool,
    scales: tuple[float, float] = (1.0, 1.0),
    **keywords: Any,
) -> tuple[torch.Tensor, ...]:
    before = [x.clone() for x in parts]
    result = function(
        *parts,
        cache,
        ids,
        not interleave,
        quant_scale_q=scales[0],
        quant_scale_kv=scales[1],
        **keywords,
    )
    assert all(same_bits(x, old) for x, old in zip(parts, before)), "an input was written"
    return result


@pytest.mark.parametrize("dims", [(64, 512), (64, 64), (128, 0), (32, 96), (48, 24), (6, 10)])
@pytest.mark.parametrize("mla", [False, True], ids=["heads", "mla"])
@both_kinds
@every_fp8
def test_sizes(
    dims: tuple[int, int],
    mla: bool,
    interleave: bool,
    fp8: torch.dtype,
    generator: torch.Generator,
) -> None:
    cache = make_cache(CACHE_ROWS, dims[0])
    for tokens, dtype in ((1, DTYPES[0]), (29, DTYPES[1])):
        heads = (5, 1) if mla else (4, 2)
        parts = draw_parts("packed", tokens, heads, dims, mla, dtype, generator)
        ids = draw_positions(tokens, generator)
        scales = (37.0, 0.5)
        exact = wanted(parts, ids, cache, interleave, scales)
        names = ["rope_quantize_fp8", *(["mla_rope_quantize_fp8"] if mla else [])]
        for name in names:
            function = getattr(precast, name)
            got = run(function, parts, ids, cache, interleave, scales, quantize_dtype=fp8)
            for word, mine, want in zip(["q_rope", "k_rope", "q_nope", "k_nope"], got, exact):
                assert mine.dtype == fp8 and mine.shape == want.shape
                assert_fp8_close(mine, want, f"{name}: {word}")


def test_without_the_part_that_is_not_rotated(generator: torch.Generator) -> None:
    q, k = heads_in("packed", 9, (4, 2), 64, dtype=torch.bfloat16, generator=generator)
    cache, ids = make_cache(CACHE_ROWS, 64), draw_positions(9, generator)
    got = precast.rope_quantize_fp8(q, k, None, None, cache, ids)
    assert [x.shape for x in got] == [q.shape, k.shape, (9, 4, 0), (9, 2, 0)]
    assert_fp8_close(got[0], exact_rope(q, phases_of_cache(ids, cache), False), "q_rope")


@every_fp8
def test_saturation_and_nan(fp8: torch.dtype) -> None:
    """What is not rotated is exact: every code, ties, numbers beyond the largest, NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(fp8).float()
    finite = codes[codes.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    beyond = torch.tensor([1e6, -1e6, float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    values = torch.cat([finite, middle, beyond]).to(torch.bfloat16)
    values = torch.cat([values, torch.zeros(-len(values) % 16, dtype=torch.bfloat16)])
    x = values.to(DEVICE).view(1, 1, -1)
    rope = torch.zeros(1, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    cache, ids = make_cache(2, 16), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    got = precast.rope_quantize_fp8(rope, rope, x, x, cache, ids, quantize_dtype=fp8)
    largest = torch.finfo(fp8).max
    want = x.float().clamp(-largest, largest).to(fp8)
    number = ~x.isnan()
    for mine in got[2:]:
        assert same_bits(mine[number], want[number])
        assert mine.float().isnan().equal(x.isnan())


@pytest.mark.parametrize("layout", LAYOUTS)
@both_kinds
def test_layouts_and_outputs(layout: str, interleave: bool, generator: torch.Generator) -> None:
    """Outputs that are slices of one tensor, as an MLA engine has them."""
    tokens, heads, dims = 11, (8, 2), (64, 128)
    parts = draw_parts(layout, tokens, heads, dims, False, torch.bfloat16, generator)
    cache, ids = make_cache(CACHE_ROWS, 64), draw_positions(tokens, generator)
    whole = [
        torch.zeros(tokens, count, sum(dims) + 3, device=DEVICE).to(torch.float8_e4m3fn)
        for count in heads
    ]
    outputs = {
        "q_nope_out": whole[0][..., : dims[1]],
        "q_rope_out": whole[0][..., dims[1] : sum(dims)],
        "k_nope_out": whole[1][..., : dims[1]],
        "k_rope_out": whole[1][..., dims[1] : sum(dims)],
    }
    got = run(precast.rope_quantize_fp8, parts, ids, cache, interleave, **outputs)
    for mine, word in zip(got, ("q_rope", "k_rope", "q_nope", "k_nope")):
        assert mine is outputs[f"{word}_out"]
    for mine, want in zip(got, wanted(parts, ids, cache, interleave, (1.0, 1.0))):
        assert_fp8_close(mine, want, layout)
    for x in whole:
        assert not x[..., sum(dims) :].float().any(), "the gap was written"


# -- into a paged cache ---------------------------------------------------------------------------


def paged(
    tokens: int, page_size: int, pages: int, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], list[tuple[int, int] | None]]:
    """A page table of three requests, and where each token goes by a loop in Python."""
    order = torch.randperm(pages, generator=generator, device=generator.device).tolist()
    counts = [pages // 2, 0, pages - pages // 2 - 1]
    indptr = [0, counts[0], counts[0], sum(counts)]
    batch, positions, places = [], [], []
    taken: dict[int, int] = {}
    for t in range(tokens):
        request = (0, 2, -1, 1)[t % 4]
        position = taken.get(request, 0)
        taken[request] = position + 1
        batch.append(request)
        positions.append(position)
        has_page = request in (0, 2) and position // page_size < counts[request]
        if has_page:
            page = order[indptr[request] + position // page_size]
            places.append((page, position % page_size))
        else:
            places.append(None)

    def index(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    table = {
        "kv_indices": index(order),
        "kv_indptr": index(indptr),
        "batch_indices": index(batch),
        "positions": index(positions),
    }
    return table, places


def filled(*shape: int, fp8: torch.dtype) -> torch.Tensor:
    """Codes that tell whether an entry was written."""
    return torch.full(shape, 0x2A, dtype=torch.uint8, device=DEVICE).view(fp8)


@pytest.mark.parametrize("kind", ["NHD", "HND", "mla"])
@pytest.mark.parametrize("page_size", [1, 16, 5])
@pytest.mark.parametrize("packed", [False, True], ids=["two", "packed"])
@every_fp8
def test_append(
    kind: str, page_size: int, packed: bool, fp8: torch.dtype, generator: torch.Generator
) -> None:
    mla, tokens, pages, dims = kind == "mla", 41, 9, (64, 96)
    heads = (4, 1) if mla else (4, 2)
    parts = draw_parts("packed", tokens, heads, dims, mla, torch.bfloat16, generator)
    cache, ids = make_cache(CACHE_ROWS, dims[0]), draw_positions(tokens, generator)
    table, places = paged(tokens, page_size, pages, generator)
    scales = (2.0, 8.0)
    exact = wanted(parts, ids, cache, False, scales)
    v = None
    if mla:
        both = filled(pages, page_size, sum(dims), fp8=fp8)
        split = (both[..., : dims[1]], both[..., dims[1] :])
        caches = split if packed else (split[0].clone(), split[1].clone())
        rows = exact[3], exact[1]
    else:
        v = heads_in("packed", tokens, (2,), 160, dtype=torch.bfloat16, generator=generator)[0]
        inner = (2, page_size) if kind == "HND" else (page_size, 2)
        both = filled(pages, 2, *inner, 160, fp8=fp8)
        caches = (both[:, 0], both[:, 1])
        if not packed:
            caches = (caches[0].clone(), caches[1].clone())
        rows = torch.cat([exact[1], exact[3]], dim=-1), v.double() * scales[1]
    result = precast.rope_quantize_fp8_append_paged_kv_cache(
        *parts,
        v,
        cache,
        ids,
        caches,
        **table,
        quantize_dtype=fp8,
        quant_scale_q=scales[0],
        quant_scale_kv=scales[1],
        page_size=page_size,
        kv_layout="HND" if kind == "HND" else "NHD",
    )
    for mine, want in zip(result, (exact[0], exact[2]), strict=True):
        assert_fp8_close(mine, want, "queries")
    assert any(place is None for place in places) and any(place for place in places)
    for target, row in zip(caches, rows, strict=True):
        left = target.clone().view(torch.uint8)
        entries = left.transpose(1, 2) if kind == "HND" else left
        written = [t for t, place in enumerate(places) if place is not None]
        got = torch.stack([entries[places[t]] for t in written]).view(fp8)  # type: ignore[index]
        assert_fp8_close(got, row[written], kind)
        for t in written:
            entries[places[t]] = 0x2A  # type: ignore[index]
        assert bool((left == 0x2A).all()), "another entry was written"


def test_indices_that_lead_nowhere(generator: torch.Generator) -> None:
    """No index makes the kernel write outside of the cache."""
    parts = draw_parts("packed", 6, (2, 1), (16, 16), True, torch.bfloat16, generator)
    caches = tuple(filled(3, 4, 16, fp8=E4M3) for _ in range(2))

    def index(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    precast.rope_quantize_fp8_append_paged_kv_cache(
        *parts,
        None,
        make_cache(8, 16),
        index(0, 1, 2, 3, 4, 5),
        caches,
        kv_indices=index(3, -1, 2**31 - 1, 0),
        kv_indptr=index(0, 3, 9),
        batch_indices=index(0, 0, 0, 7, 1, 0),
        positions=index(0, 4, 8, 0, 4, -1),
        page_size=4,
    )
    for x in caches:
        assert bool((x.view(torch.uint8) == 0x2A).all())


@pytest.mark.parametrize("far", [2**32, 2**40, 2**63 - 1, -(2**32)])
@pytest.mark.parametrize("name", ["batch_indices", "positions", "kv_indptr", "kv_indices"])
def test_wide_indices_are_not_wrapped(name: str, far: int, generator: torch.Generator) -> None:
    """Added to an index that has a place, so that its low word keeps that place."""
    parts = draw_parts("packed", 4, (2, 1), (16, 16), True, torch.bfloat16, generator)
    caches = tuple(filled(3, 4, 16, fp8=E4M3) for _ in range(2))

    def index(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    table = {
        "kv_indices": index(2, 0, 1),
        "kv_indptr": index(0, 1, 3),
        "batch_indices": index(0, 0, 1, 1),
        "positions": index(0, 1, 0, 5),
    }
    call = {**table, name: table[name] + far}
    ids, cache = index(0, 1, 2, 3), make_cache(8, 16)
    function = precast.rope_quantize_fp8_append_paged_kv_cache
    function(*parts, None, cache, ids, caches, **call, page_size=4)
    for x in caches:
        assert bool((x.view(torch.uint8) == 0x2A).all())
    function(*parts, None, cache, ids, caches, **table, page_size=4)
    assert not any(bool((x.view(torch.uint8) == 0x2A).all()) for x in caches)


# -- what engines do ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 4099])
def test_empty_and_many(tokens: int, generator: torch.Generator) -> None:
    parts = draw_parts("contiguous", tokens, (16, 1), (64, 512), True, torch.bfloat16, generator)
    cache, ids = make_cache(CACHE_ROWS, 64), draw_positions(tokens, generator)
    got = run(precast.mla_rope_quantize_fp8, parts, ids, cache, True, enable_pdl=True)
    for mine, want in zip(got, wanted(parts, ids, cache, True, (1.0, 1.0))):
        assert_fp8_close(mine, want, "many")


def test_graph_and_compile(generator: torch.Generator) -> None:
    parts = draw_parts("packed", 17, (8, 1), (64, 128), True, torch.bfloat16, generator)
    cache, ids = make_cache(CACHE_ROWS, 64), draw_positions(17, generator)
    pages = tuple(filled(4, 8, dim, fp8=E4M3) for dim in (128, 64))
    table, _ = paged(17, 8, 4, generator)

    def block(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quantized = precast.mla_rope_quantize_fp8(*parts, cache, ids, enable_pdl=True)
        queries = precast.rope_quantize_fp8_append_paged_kv_cache(
            *parts, None, cache, ids, pages, **table, page_size=8, enable_pdl=True
        )
        return (*quantized, *queries)

    want = [x.clone() for x in (*block(*parts), *pages)]
    for x in pages:
        x.view(torch.uint8).fill_(0x2A)
    torch._dynamo.reset()
    got = (*torch.compile(block, fullgraph=True)(*parts), *pages)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    for x in pages:
        x.view(torch.uint8).fill_(0x2A)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(*parts)
    for x in captured:
        x.view(torch.uint8).fill_(0x2A)
    graph.replay()
    assert all(same_bits(a, b) for a, b in zip((*captured, *pages), want, strict=True))


needs_memory = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 24 << 30,
    reason="needs 24 GiB of free GPU memory",
)


@needs_memory
def test_more_than_2_to_31_elements(generator: torch.Generator, free_memory: None) -> None:
    heads = 20
    tokens = 2**31 // (heads * 512) + 9
    q = torch.empty(tokens, heads, 576, dtype=torch.bfloat16, device=DEVICE)
    q.normal_(generator=generator)
    k = torch.ones(tokens, 576, dtype=torch.bfloat16, device=DEVICE)
    parts = [q[..., :64], k[..., :64], q[..., 64:], k[..., 64:]]
    cache, ids = make_cache(CACHE_ROWS, 64), draw_positions(tokens, generator)
    got = precast.mla_rope_quantize_fp8(*parts, cache, ids)
    assert got[2].numel() > 2**31
    sample = [0, 1, tokens // 2, tokens - 2, tokens - 1]
    want = wanted([x[sample] for x in parts], ids[sample], cache, False, (1.0, 1.0))
    for mine, exact in zip(got, want):
        assert_fp8_close(mine[sample], exact, "huge")


@needs_memory
@pytest.mark.parametrize("kind", ["NHD", "HND", "mla"])
@pytest.mark.parametrize("wide", [False, True], ids=["i32", "i64"])
def test_a_cache_of_more_than_2_to_31_elements(
    kind: str, wide: bool, generator: torch.Generator, free_memory: None
) -> None:
    mla, size = kind == "mla", 16
    heads, dims = (1, (64, 512)) if mla else (8, (64, 64))
    pages = 2**31 // (size * heads * dims[1]) + 7
    inner = (size,) if mla else (heads, size) if kind == "HND" else (size, heads)
    widths = (dims[1], dims[0]) if mla else (sum(dims), sum(dims))
    caches = tuple(
        torch.zeros(pages, *inner, width, dtype=torch.uint8, device=DEVICE) for width in widths
    )
    assert caches[0].numel() > 2**31
    page = torch.tensor([0, 1, pages // 2, pages - 2, pages - 1], device=DEVICE)
    entry = torch.tensor([0, 15, 7, 3, 15], device=DEVICE)
    parts = draw_parts("packed", 5, (4, heads), dims, mla, torch.bfloat16, generator)
    cache, ids = make_cache(CACHE_ROWS, dims[0]), draw_positions(5, generator)
    v = None
    if not mla:
        (v,) = heads_in("packed", 5, (heads,), 128, dtype=torch.bfloat16, generator=generator)

    def index(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int64 if wide else torch.int32)

    precast.rope_quantize_fp8_append_paged_kv_cache(
        *parts,
        v,
        cache,
        ids,
        tuple(x.view(E4M3) for x in caches),
        kv_indices=index(page),
        kv_indptr=index(torch.arange(6, device=DEVICE)),
        batch_indices=index(torch.arange(5, device=DEVICE)),
        positions=index(entry),
        page_size=size,
        kv_layout="HND" if kind == "HND" else "NHD",
    )
    exact = wanted(parts, ids, cache, False, (1.0, 1.0))
    rows = (exact[3], exact[1]) if v is None else (torch.cat(exact[1::2], -1), v.double())
    for mine, want in zip(caches, rows, strict=True):
        entries = mine.transpose(1, 2) if kind == "HND" else mine
        assert_fp8_close(entries[page, entry].view(E4M3), want, kind)
        entries[page, entry] = 0
        assert not mine.view(-1).any()
