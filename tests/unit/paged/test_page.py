# SPDX-License-Identifier: Apache-2.0
"""Appending to a paged KV cache in reference mode, against loops over the definition."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from page_support import BITS, bits

import precast
from precast.trace import fi_trace, make_inputs, registered

BF16 = torch.bfloat16
LAYOUTS = ("NHD", "HND")
FORMS = ("pair", "packed", "slices", "padded pages")
PAGES, HEADS, DIM = 11, 3, 16

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

pytestmark = pytest.mark.usefixtures("reference_mode")


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all: copies must not touch NaNs."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    return torch.randint(256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def make_cache(form: str, layout: str, page_size: int, dtype: torch.dtype) -> Cache:
    inner = (HEADS, page_size) if layout == "HND" else (page_size, HEADS)
    if form == "packed":
        return random_bits(PAGES, 2, *inner, DIM, dtype=dtype)
    if form == "pair":
        return tuple(random_bits(PAGES, *inner, DIM, dtype=dtype) for _ in range(2))  # type: ignore
    if form == "slices":  # Keys and values beside each other in one row.
        whole = random_bits(PAGES, *inner, 2 * DIM, dtype=dtype)
        return whole[..., :DIM], whole[..., DIM:]
    whole = random_bits(PAGES, 3, *inner, DIM, dtype=dtype)
    return whole[:, 0], whole[:, 2]


def entry(cache: Cache, half: int, layout: str, page: int, at: int) -> torch.Tensor:
    """One entry ``[heads, dim]`` of keys or values, by the definition of the layouts."""
    part = cache[half] if isinstance(cache, tuple) else cache[:, half]
    return part[page, :, at] if layout == "HND" else part[page, at]


def clones(cache: Cache) -> Cache:
    return tuple(c.clone() for c in cache) if isinstance(cache, tuple) else cache.clone()  # type: ignore


def same(a: Cache, b: Cache) -> bool:
    pairs = zip(a, b) if isinstance(a, tuple) else [(a, b)]
    return all(torch.equal(bits(x), bits(y)) for x, y in pairs)


def table_call(page_size: int, index: torch.dtype) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """A ragged batch as engines have it, with tokens that have no place, and where tokens go."""
    lengths = [0, 2 * page_size + 1, 1, page_size]
    pages = [-(-n // page_size) for n in lengths]
    indptr = torch.tensor([0, *pages]).cumsum(0)
    indices = torch.randperm(PAGES)[: int(indptr[-1])]
    last = torch.tensor([n - max(p - 1, 0) * page_size for n, p in zip(lengths, pages)])
    tokens = [(1, 0), (1, page_size), (1, 2 * page_size), (2, 0), (3, page_size - 1)]
    places = [(int(indices[indptr[b] + p // page_size]), p % page_size) for b, p in tokens]
    lost = [(-1, 0), (0, 0), (2, -1), (4, 0), (3, page_size), (2, 2**31 - 1)]
    table = {
        "batch_indices": torch.tensor([b for b, _ in tokens + lost]),
        "positions": torch.tensor([p for _, p in tokens + lost]),
        "kv_indices": indices,
        "kv_indptr": indptr,
        "kv_last_page_len": last,
    }
    return {k: v.to(index) for k, v in table.items()}, [*places, *[None] * len(lost)]


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_append_paged_kv_cache(page_size: int, layout: str, form: str, dtype: torch.dtype) -> None:
    table, places = table_call(page_size, torch.int32)
    rows = [random_bits(len(places), HEADS, DIM, dtype=dtype) for _ in range(2)]
    cache = make_cache(form, layout, page_size, dtype)
    want = clones(cache)
    for token, place in enumerate(places):
        for half in range(2):
            if place is not None:
                bits_of = entry(want, half, layout, *place).view(BITS[dtype.itemsize])
                bits_of.copy_(rows[half][token].view(BITS[dtype.itemsize]))
    first = {"append_key": rows[0], "append_value": rows[1], "paged_kv_cache": cache}
    assert precast.append_paged_kv_cache(**first, **table, kv_layout=layout) is None
    assert same(cache, want)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_slots(form: str, layout: str, index: torch.dtype) -> None:
    page_size, tokens = 4, 9
    slots = torch.randperm(PAGES * page_size)[:tokens].to(index)
    slots[3], slots[5] = -1, PAGES * page_size
    rows = [random_bits(tokens + 2, HEADS, DIM, dtype=BF16) for _ in range(2)]
    cache = make_cache(form, layout, page_size, BF16)
    want = clones(cache)
    for token, slot in enumerate(slots.tolist()):
        if token not in (3, 5):
            for half in range(2):
                entry(want, half, layout, *divmod(slot, page_size)).copy_(rows[half][token])
    precast.append_paged_kv_cache_with_slot_mapping(*rows, slots, cache, layout)
    assert same(cache, want)


def test_page_size_one_may_be_left_out() -> None:
    rows, slots = random_bits(3, HEADS, DIM, dtype=BF16), torch.tensor([4, 0, 7])
    for layout in LAYOUTS:
        cache = random_bits(PAGES, 2, HEADS, DIM, dtype=BF16)
        pair = (
            random_bits(PAGES, HEADS, DIM, dtype=BF16),
            random_bits(PAGES, HEADS, DIM, dtype=BF16),
        )
        precast.append_paged_kv_cache_with_slot_mapping(rows, rows, slots, cache, layout)
        precast.append_paged_kv_cache_with_slot_mapping(rows, rows, slots, pair, layout)
        for got in (cache[:, 0], cache[:, 1], *pair):
            assert torch.equal(bits(got[slots]), bits(rows))


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("one_buffer", [False, True])
def test_mla(one_buffer: bool, dtype: torch.dtype) -> None:
    page_size, dims = 4, (32, 8)
    whole = random_bits(PAGES, page_size, sum(dims), dtype=dtype)
    caches = tuple(whole.split(dims, -1) if one_buffer else map(torch.clone, whole.split(dims, -1)))
    want = tuple(map(torch.clone, caches))
    table, places = table_call(page_size, torch.int64)
    rows = [random_bits(len(places), dim, dtype=dtype) for dim in dims]
    slots = []
    for token, place in enumerate(places):
        slots.append(-1 if place is None else place[0] * page_size + place[1])
        if place is not None:
            for part, row in zip(want, rows):
                part[place].view(BITS[dtype.itemsize]).copy_(row[token].view(BITS[dtype.itemsize]))
    before = tuple(map(torch.clone, caches))
    first = {"append_ckv": rows[0], "append_kpe": rows[1]}
    named = {"ckv_cache": caches[0], "kpe_cache": caches[1]}
    precast.append_paged_mla_kv_cache(**first, **named, **table)
    assert same(caches, want)  # type: ignore[arg-type]
    for cache, old in zip(caches, before):
        cache.view(BITS[dtype.itemsize]).copy_(old.view(BITS[dtype.itemsize]))
    slot_mapping = torch.tensor(slots)
    precast.append_paged_mla_kv_cache_with_slot_mapping(**first, **named, slot_mapping=slot_mapping)
    assert same(caches, want)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_fp8(as_tensor: bool, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    rows = torch.randn(4, HEADS, DIM).mul(100).to(BF16)
    rows[0, 0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    cache = torch.zeros(PAGES, 2, 2, HEADS, DIM).to(dtype)
    scales: list[Any] = [0.37, 1e-3]
    given = [torch.tensor([s]) for s in scales] if as_tensor else scales
    slots = torch.tensor([3, -1, 0, 21])
    precast.fp8_quantize_append_paged_kv_cache_with_slot_mapping(rows, rows, slots, cache, *given)
    for half, scale in enumerate(scales):
        divisor = torch.tensor(scale, dtype=torch.float32).double()
        exact = (rows.double() / divisor).float()  # The fp32 quotient: double rounding is harmless.
        want = exact.clamp(-most, most).to(dtype)
        for token in (0, 2, 3):
            slot = int(slots[token])
            got = cache[slot // 2, half, slot % 2]
            assert torch.equal(got.isnan(), want[token].isnan())
            kept = ~want[token].isnan()
            assert torch.equal(got.view(torch.uint8)[kept], want[token].view(torch.uint8)[kept])
    assert not cache.float().nan_to_num()[4:10].any()


@pytest.mark.parametrize("form", ["pair", "packed", "joined"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e4m3fn, torch.uint8])
def test_nvfp4(scale_dtype: torch.dtype, as_tensor: bool, layout: str, form: str) -> None:
    """By page table and by slots: the numbers of nvfp4_kv_quantize in their places."""
    page_size, dims = 4, (32, 32) if form == "packed" else (32, 48)
    table, places = table_call(page_size, torch.int32)
    rows = [torch.randn(len(places), HEADS, dim).mul(3).to(BF16) for dim in dims]
    rows[0][0, 0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    inner = (HEADS, page_size) if layout == "HND" else (page_size, HEADS)

    def made(numbers: int) -> Any:
        return tuple(
            torch.randint(256, (PAGES, *inner, dim // numbers), dtype=torch.uint8) for dim in dims
        )

    codes, factors = made(2), made(16)
    if form == "joined":  # Codes and scales of an entry beside each other in one row.
        whole = [torch.cat(both, -1) for both in zip(codes, factors)]
        codes = tuple(x[..., : dim // 2] for x, dim in zip(whole, dims))
        factors = tuple(x[..., dim // 2 :] for x, dim in zip(whole, dims))
    if form == "packed":
        codes, factors = torch.stack(codes, 1), torch.stack(factors, 1)
    scales: list[Any] = [0.37, 0.02]
    given = [torch.tensor([s]) for s in scales] if as_tensor else scales
    wanted_codes, wanted_factors = clones(codes), clones(factors)
    slots = []
    for token, place in enumerate(places):
        slots.append(-1 if place is None else place[0] * page_size + place[1])
        for half in range(2) if place is not None else ():
            want = precast.nvfp4_kv_quantize(rows[half][token], torch.tensor(scales[half]))
            for part, result in zip((wanted_codes, wanted_factors), want):
                entry(part, half, layout, *place).copy_(result)
    before = clones(codes), clones(factors)
    as_scales = (
        tuple(f.view(scale_dtype) for f in factors)
        if isinstance(factors, tuple)
        else factors.view(scale_dtype)
    )
    first = {"append_key": rows[0], "append_value": rows[1], "paged_kv_cache": codes}
    last = {"kv_cache_sf": as_scales, "k_scale": given[0], "v_scale": given[1]}
    precast.nvfp4_quantize_append_paged_kv_cache(**first, **table, **last, kv_layout=layout)
    for _ in range(2):
        assert same(codes, wanted_codes)
        assert same(factors, wanted_factors)
        for part, old in zip((codes, factors), before):
            for x, y in zip(*((t if isinstance(t, tuple) else (t,)) for t in (part, old))):
                x.copy_(y)
        precast.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            **first, **last, slot_mapping=torch.tensor(slots), kv_layout=layout
        )


def test_nvfp4_comes_back() -> None:
    rows = torch.randn(2, 5, HEADS, 64).to(BF16)
    g = (rows.float().abs().amax() / (448 * 6)).reshape(1)
    cache = torch.zeros(PAGES, 2, 2, HEADS, 32, dtype=torch.uint8)
    factors = torch.zeros(PAGES, 2, 2, HEADS, 4).to(torch.float8_e4m3fn)
    slots = torch.tensor([8, 9, 2, 3, 20])
    precast.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        *rows, slots, cache, factors, g, g
    )
    out = torch.zeros(2, 1, 5, HEADS, 64, dtype=BF16)
    pages, lens = torch.tensor([[4, 1, 10]]), torch.tensor([5], dtype=torch.int32)
    precast.nvfp4_kv_dequantize_paged(cache, factors, pages, lens, g, g, *out)
    biggest = rows.float().unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    assert ((out[:, 0].float() - rows.float()).abs() <= biggest * 0.19).all()


def test_fp8_of_mla() -> None:
    rows = torch.randn(3, 8).half(), torch.randn(3, 4).half()
    whole = torch.zeros(2, 4, 12).to(torch.float8_e4m3fn)
    caches = whole[..., :8], whole[..., 8:]
    slots = torch.tensor([7, 1, -1], dtype=torch.int32)
    precast.fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping(*rows, slots, *caches, 0.25)
    both = torch.cat(rows, -1)
    want = (both.float() / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(whole[1, 3].float(), want[0].float())
    assert torch.equal(whole[0, 1].float(), want[1].float())
    assert int((whole.float() != 0).sum()) <= 24


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("indptr", [[0, 1, 3, 6, 10], [0, 0, 4, 4, 4], [2, 5, 7], [0], [0, 0]])
@pytest.mark.parametrize("nnz", [0, 1, 10, 13])
def test_batch_indices_positions(nnz: int, indptr: list[int], index: torch.dtype) -> None:
    lens = [5 + 3 * b for b in range(len(indptr) - 1)]
    want_batch, want_position = [-1] * nnz, [0] * nnz
    for b, (start, end) in enumerate(pairwise(indptr)):
        for i in range(start, min(end, nnz)):
            want_batch[i], want_position[i] = b, i + lens[b] - end
    args = torch.tensor(indptr, dtype=index), torch.tensor(lens, dtype=index), nnz
    got = precast.get_batch_indices_positions(*args)
    assert [t.tolist() for t in got] == [want_batch, want_position]
    assert {t.dtype for t in got} == {torch.int32}
    out = tuple(torch.full((nnz,), 77, dtype=torch.int32) for _ in range(2))
    again = precast.get_batch_indices_positions(*args, *out)
    assert all(a is b for a, b in zip(again, out))
    assert [t.tolist() for t in out] == [want_batch, want_position]


def test_batch_indices_of_ends_beyond_32_bits() -> None:
    indptr, lens = torch.tensor([0, 3, 2**31 + 10]), torch.tensor([5, 2**31 + 20])
    got = precast.get_batch_indices_positions(indptr, lens, 5)
    assert [t.tolist() for t in got] == [[0, 0, 0, 1, 1], [2, 3, 4, 13, 14]]


def test_the_whole_chain_of_an_engine() -> None:
    page_size, lengths, new = 4, [5, 9, 4], [5, 2, 1]
    pages = [-(-n // page_size) for n in lengths]
    kv_indptr = torch.tensor([0, *pages]).cumsum(0).int()
    last = torch.tensor([(n - 1) % page_size + 1 for n in lengths]).int()
    seq_lens = precast.get_seq_lens(kv_indptr, last, page_size)
    assert seq_lens.tolist() == lengths
    indptr = torch.tensor([0, *new]).cumsum(0).int()
    batch, positions = precast.get_batch_indices_positions(indptr, seq_lens, sum(new))
    assert positions.tolist() == [0, 1, 2, 3, 4, 7, 8, 3]
    cache = torch.zeros(PAGES, 2, page_size, HEADS, DIM)
    rows = torch.randn(sum(new), HEADS, DIM)
    table = torch.arange(sum(pages)).int(), kv_indptr, last
    precast.append_paged_kv_cache(rows, rows, batch, positions, cache, *table)
    assert torch.equal(cache[0, 0, :4], rows[:4])
    assert torch.equal(cache[kv_indptr[2] - 1, 1, 0], rows[6])
    assert int((cache != 0).any(-1).any(-1).sum()) == 2 * sum(new)


def test_get_seq_lens_of_a_request_without_pages() -> None:
    got = precast.get_seq_lens(torch.tensor([0, 0, 2]), torch.tensor([0, 3]), 16)
    assert got.tolist() == [0, 19]


@pytest.mark.parametrize("lens", [[3], [1, 2, 3], [[1, 2]]])
def test_get_seq_lens_rejects_other_shapes(lens: object) -> None:
    with pytest.raises(ValueError, match="get_seq_lens: kv_last_page_len must have"):
        precast.get_seq_lens(torch.tensor([0, 1, 2]), torch.tensor(lens), 16)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("sizes", [(5, 128, 128, 64), (2, 3, 5, 7), (0, 4, 8, 8), (3, 1, 16, 0)])
def test_concat_mla_k(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, heads, nope, rope = sizes
    k = random_bits(tokens, heads, nope + rope + 3, dtype=dtype)[..., : nope + rope]
    parts = random_bits(tokens, heads, nope, dtype=dtype), random_bits(tokens, 1, rope, dtype=dtype)
    assert precast.concat_mla_k(k, *parts) is None
    for head in range(heads):
        want = torch.cat([bits(parts[0])[:, head], bits(parts[1])[:, 0]], -1)
        assert torch.equal(bits(k)[:, head], want)


# -- torch.compile --------------------------------------------------------------------------------

CALLS = {
    template.name_prefix: (function, template)
    for function, template in registered()
    if template.op_type == "page_append" or template.name_prefix == "concat_mla_k"
}


@pytest.mark.parametrize("name", [n for n in CALLS if not n.endswith(("hnd", "page1"))])
def test_torch_compile_without_a_graph_break(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It writes the same, and its trace is the same definition."""
    function, template = CALLS[name]
    monkeypatch.setenv("PRECAST_TRACE_DUMP", "1")
    monkeypatch.setenv("PRECAST_TRACE_DUMP_DIR", str(tmp_path))
    calls = [make_inputs(function, template, seed=4) for _ in range(2)]

    def model(call: dict[str, Any]) -> Any:
        return function(**call)

    want = model(calls[0])
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(calls[1])
    for mine, theirs in zip(got or (), want or (), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(template.values(calls[1]), template.values(calls[0]), strict=True):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(bits(mine), bits(theirs))
    definition = fi_trace(function, **calls[0])
    (written,) = tmp_path.rglob(f"{definition['name']}.json")
    assert json.loads(written.read_text()) == definition
