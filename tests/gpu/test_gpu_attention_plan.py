# SPDX-License-Identifier: Apache-2.0
"""Plans of attention that the GPU makes: every tile once, in parts that fit together.

The walk of ``attention_schedule.cuh`` is written here once more, on what the kernel wrote; the
formulas of a plan are tested on the CPU, by ``tests/build/test_attention_schedule.py``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from plan_layout import constant, read, size_of

from precast._runtime.loader import get_function, loader

BLOCK = constant("kKvBlock")
DIM = 128


def function(export: str) -> Callable[..., None]:
    return get_function(loader.load("attention_plan", {}, torch.cuda.current_device()), export)


class Shape(NamedTuple):
    """What a plan depends on besides lengths."""

    tile_rows: int = 16
    heads: int = 2
    group: int = 4
    causal: bool = False
    window_left: int = -1
    page_size: int = 16
    fixed_split_size: int = -1
    disable_split_kv: bool = False

    def arguments(self, batch: int, q_len: int) -> tuple[Any, ...]:
        sizes = batch, q_len, self.page_size, self.heads * self.group, self.heads, DIM, DIM, 2
        rest = self.fixed_split_size, self.disable_split_kv
        return *sizes, self.tile_rows, self.causal, self.window_left, *rest

    def tokens(self, q_len: int, kv_len: int, tile: int) -> tuple[int, int]:
        """What the rows of a tile may see, from whole blocks on."""
        rows = range(tile * self.tile_rows, min((tile + 1) * self.tile_rows, q_len * self.group))
        shift = kv_len - q_len
        end = shift + rows[-1] // self.group + 1 if self.causal else kv_len
        begin = shift + rows[0] // self.group - self.window_left if self.window_left >= 0 else 0
        begin = max(begin, 0)
        return (begin // BLOCK * BLOCK, end) if begin < end else (0, 0)


class Batch(NamedTuple):
    q_lens: list[int]
    kv_lens: list[int]

    def tensors(self, shape: Shape, by_kv_len: bool, q_len: int) -> tuple[Any, ...]:
        def indptr(counts: list[int]) -> torch.Tensor:
            return torch.tensor([0, *counts]).cumsum(0).int()

        page = shape.page_size or 1
        pages = [-(-n // page) for n in self.kv_lens]
        last = [n - (p - 1) * page if p else 0 for n, p in zip(self.kv_lens, pages)]
        lengths = torch.tensor(self.kv_lens).int(), torch.tensor(last).int()
        return (
            None if q_len else indptr(self.q_lens),
            indptr(pages),
            None if by_kv_len or not shape.page_size else lengths[1],
            lengths[0] if by_kv_len else None,
        )


SM_COUNT = 132


def sizes_of(shape: Shape, batch: Batch, sm_count: int, q_len: int = 0) -> list[int]:
    out = torch.zeros(3, dtype=torch.int64)
    lengths = batch.tensors(shape, False, q_len)
    function("workspace_size")(*lengths, out, *shape.arguments(len(batch.q_lens), q_len), sm_count)
    return out.tolist()


def ctas_of(tile_rows: int) -> int:
    """From the slots of a plan of one tile, two for each CTA."""
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    size = sizes_of(Shape(tile_rows), Batch([1], [100_000]), sm_count)[0]
    return size // (2 * 4 * tile_rows * (DIM + 2))


class Piece(NamedTuple):
    tile: tuple[int, int, int]
    begin: int
    end: int
    part: int
    parts: int
    slot: int
    counter: int


class Walk:
    """The pieces of a plan."""

    def __init__(self, plan: torch.Tensor, shape: Shape, batch: Batch, ctas: int) -> None:
        self.ints, self.shape, self.ctas = plan.tolist(), shape, ctas
        self.counters = size_of("PlanHeader")
        self.starts = self.counters + -(-ctas // 4) * 4
        self.requests = self.starts + size_of("CtaStart") * (ctas + 1)
        header = read(self.ints, "PlanHeader")
        self.is_list, self.count, self.tiles = header["mode"], header["requests"], header["tiles"]
        self.chunk, self.items, self.items_at = header["chunk"], header["items"], header["items_at"]
        self.counters_at, self.slots, self.length = (
            header[name] for name in ("counters_at", "slots", "ints")
        )
        self.batch = batch

    def request(self, index: int) -> tuple[int, int, int]:
        it = self.at(self.requests, index, "PlannedRequest")
        number, q_len, kv_len = it["request"], it["q_len"], it["kv_len"]
        assert it["q_begin"] == sum(self.batch.q_lens[:number])
        page = self.shape.page_size or 1
        assert it["kv_start"] == sum(-(-n // page) for n in self.batch.kv_lens[:number])
        assert (q_len, kv_len) == (self.batch.q_lens[number], self.batch.kv_lens[number])
        return number, q_len * self.shape.group, it["tiles_before"]

    def at(self, base: int, index: int, struct: str) -> dict[str, int]:
        return read(self.ints, struct, base + index * size_of(struct))

    def pieces(self) -> Iterator[Piece]:
        return self.listed() if self.is_list else self.streamed()

    def listed(self) -> Iterator[Piece]:
        heads = self.shape.heads
        for item in range(self.items):
            of = self.at(self.items_at, item, "ListItem")
            index, tile, part, slot = (of[name] for name in ("index", "tile", "part", "slot"))
            number, _, before = self.request(index)
            lengths = self.batch.q_lens[number], self.batch.kv_lens[number]
            begin, end = self.shape.tokens(*lengths, tile)
            parts = 1
            if self.chunk and begin < end:
                first = begin // self.chunk
                parts = (end - 1) // self.chunk - first + 1
                limit = (first + part + 1) * self.chunk
                begin, end = max(begin, (first + part) * self.chunk), min(end, limit)
            for head in range(heads):
                counter = self.counters_at + (before + tile) * heads + head
                place = (slot + part) * heads + head
                yield Piece((number, head, tile), begin, end, part, parts, place, counter)

    def start(self, cta: int) -> list[int]:
        of = self.at(self.starts, cta, "CtaStart")
        return [of[n] for n in ("index", "head", "tile", "block", "first_cta", "parts")]

    def streamed(self) -> Iterator[Piece]:
        for cta in range(self.ctas):
            index, head, tile, block, first, parts = self.start(cta)
            end = self.start(cta + 1)
            while (index, head, tile, block) != tuple(end[:4]):
                number, rows, _ = self.request(index)
                lengths = self.batch.q_lens[number], self.batch.kv_lens[number]
                begin, last = self.shape.tokens(*lengths, tile)
                goes_on = [index, head, tile] == end[:3]
                if block == 0:
                    first, parts = (end[4], end[5]) if goes_on else (cta, 1)
                if goes_on:
                    last = begin + end[3] * BLOCK
                slot = 2 * cta + (cta == first)
                counter = self.counters + first
                where = (number, head, tile)
                yield Piece(where, begin + block * BLOCK, last, cta - first, parts, slot, counter)
                if goes_on:
                    break
                block, tile = 0, tile + 1
                if tile * self.shape.tile_rows >= rows:
                    tile, index = 0, index + 1
                if index == self.count:
                    index, head = 0, head + 1


def check(walk: Walk) -> None:
    found: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
    for piece in walk.pieces():
        found[piece.tile].append(piece)
    shape, batch = walk.shape, walk.batch
    want = {
        (request, head, tile)
        for request, q_len in enumerate(batch.q_lens)
        for head in range(shape.heads)
        for tile in range(-(-q_len * shape.group // shape.tile_rows))
    }
    assert found.keys() == want
    slots: list[int] = []
    counters: list[int] = []
    for (request, _, tile), pieces in found.items():
        pieces.sort(key=lambda piece: piece.part)
        assert [piece.part for piece in pieces] == list(range(pieces[0].parts))
        assert {piece.parts for piece in pieces} == {len(pieces)}
        begin, end = shape.tokens(batch.q_lens[request], batch.kv_lens[request], tile)
        borders = [begin, *(piece.end for piece in pieces)]
        assert [piece.begin for piece in pieces] == borders[:-1]
        assert borders[-1] == end
        assert len(pieces) == 1 or all(a < b for a, b in itertools.pairwise(borders))
        if len(pieces) > 1:
            slots += [piece.slot for piece in pieces]
            counters.append(pieces[0].counter)
            assert {piece.counter for piece in pieces} == set(counters[-1:])
    assert len(set(slots)) == len(slots)
    assert len(set(counters)) == len(counters)
    assert all(0 <= slot < walk.slots for slot in slots)
    assert all(walk.ints[counter] == 0 for counter in counters), "tickets start at 0"


def planned(shape: Shape, batch: Batch, by_kv_len: bool = False, q_len: int = 0) -> Walk:
    """The plan on the GPU, in workspaces that are exactly as large as they must be."""
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    floats, ints, _ = sizes_of(shape, batch, sm_count, q_len)
    guard = 4096
    buffer = torch.randint(256, (ints + guard,), dtype=torch.uint8, device="cuda")
    before = buffer.clone()
    lengths = [
        None if tensor is None else tensor.cuda()
        for tensor in batch.tensors(shape, by_kv_len, q_len)
    ]
    space = torch.empty(max(floats, 16), dtype=torch.uint8, device="cuda")
    arguments = shape.arguments(len(batch.q_lens), q_len)
    function("plan")(*lengths, buffer[:ints], space, *arguments, True)
    assert torch.equal(buffer[ints:], before[ints:]), "a plan wrote past its workspace"
    ctas = ctas_of(shape.tile_rows)
    walk = Walk(buffer[: ints // 4 * 4].view(torch.int32), shape, batch, ctas)
    assert walk.length * 4 <= ints
    assert walk.slots * 4 * shape.tile_rows * (DIM + 2) <= max(floats, 16)
    return walk


def random_batch(count: int, most_q: int, most_kv: int, g: torch.Generator) -> Batch:
    def draw(most: int) -> list[int]:
        return torch.randint(most + 1, (count,), device=g.device, generator=g).tolist()

    return Batch(draw(most_q), draw(most_kv))


SHAPES = {
    "plain": Shape(),
    "causal": Shape(causal=True, tile_rows=64),
    "wide": Shape(causal=True, tile_rows=128, group=8),
    "window": Shape(window_left=100, causal=True, group=3),
    "ragged": Shape(page_size=0, tile_rows=64),
    "pages of one": Shape(page_size=1, heads=5),
    "chunks": Shape(fixed_split_size=16),
    "causal chunks": Shape(fixed_split_size=8, causal=True, tile_rows=64, window_left=700),
    "whole": Shape(disable_split_kv=True),
    "whole and wide": Shape(disable_split_kv=True, causal=True, tile_rows=128),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("count", "most_q", "most_kv"),
    [(1, 1, 9000), (5, 1, 3000), (64, 2, 700), (7, 300, 2000), (3, 40, 0), (600, 1, 90), (1, 0, 9)],
)
def test_random_lengths(
    count: int, most_q: int, most_kv: int, name: str, generator: torch.Generator
) -> None:
    shape = SHAPES[name]
    for by_kv_len in (False, True):
        batch = random_batch(count, most_q, most_kv, generator)
        check(planned(shape, batch, by_kv_len and shape.page_size > 0))


@pytest.mark.parametrize("q_len", [1, 3, 7])
def test_as_many_queries_of_each(q_len: int, generator: torch.Generator) -> None:
    kv_lens = random_batch(33, 1, 3000, generator).kv_lens
    for name in ("plain", "window", "chunks", "whole"):
        check(planned(SHAPES[name], Batch([q_len] * 33, kv_lens), q_len=q_len))


def test_no_requests() -> None:
    for name in ("plain", "wide", "chunks", "whole"):
        walk = planned(SHAPES[name], Batch([], []))
        assert list(walk.pieces()) == []


def test_many_tiles_are_a_list(generator: torch.Generator) -> None:
    """More than what the kernel keeps in shared memory; the longest come first."""
    shape = Shape(causal=True, tile_rows=64, heads=1)
    batch = Batch([40_000, 3], [40_000, 50])
    walk = planned(shape, batch)
    assert walk.is_list
    assert walk.tiles > constant("kFewTiles")
    check(walk)
    lengths = [piece.end - piece.begin for piece in walk.listed()]
    coarse = -(-max(lengths) // 1000)
    assert all(b <= a + 2 * coarse + BLOCK for a, b in itertools.pairwise(lengths))


def test_chunks_grow_where_there_is_no_room() -> None:
    """What the host would have refused cannot be refused by the GPU."""
    shape, batch = SHAPES["chunks"], Batch([1] * 8, [5000] * 8)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    floats, ints, _ = sizes_of(shape, batch, sm_count)
    lengths = [None if t is None else t.cuda() for t in batch.tensors(shape, False, 0)]
    buffer = torch.empty(ints, dtype=torch.uint8, device="cuda")
    space = torch.empty(floats // 3, dtype=torch.uint8, device="cuda")
    function("plan")(*lengths, buffer, space, *shape.arguments(8, 0), True)
    plan = buffer[: ints // 4 * 4].view(torch.int32)
    walk = Walk(plan, shape, batch, ctas_of(16))
    assert walk.chunk > 16 * 16
    check(walk)


def test_in_a_graph_with_other_lengths(generator: torch.Generator) -> None:
    shape = SHAPES["causal"]
    batches = [random_batch(9, 40, 3000, generator) for _ in range(4)]
    ints = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    space = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    lengths = [None if t is None else t.cuda() for t in batches[0].tensors(shape, False, 0)]
    plan = function("plan")
    arguments = *lengths, ints, space, *shape.arguments(9, 0), True
    plan(*arguments)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        import tvm_ffi

        with tvm_ffi.use_torch_stream(torch.cuda.current_stream()):
            plan(*arguments)
    for batch in batches:
        for held, new in zip(lengths, batch.tensors(shape, False, 0), strict=True):
            if held is not None:
                held.copy_(new)
        graph.replay()
        check(Walk(ints.view(torch.int32), shape, batch, ctas_of(64)))


def test_refusals() -> None:
    shape, batch = SHAPES["plain"], Batch([1, 1], [100, 200])
    plan = function("plan")
    ints = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    cpu = batch.tensors(shape, False, 0)
    lengths = [None if t is None else t.cuda() for t in cpu]
    good = [*lengths, ints, ints.clone(), *shape.arguments(2, 0), True]

    def refused(words: str, **changes: Any) -> None:
        names = (
            "qo_indptr kv_indptr kv_last_page_len kv_len int_workspace float_workspace batch_size"
        )
        arguments = list(good)
        for name, value in changes.items():
            positions = {**dict(zip(names.split(), range(7))), "heads": 10, "dim": 12, "rows": 14}
            arguments[positions[name]] = value
        with pytest.raises(ValueError, match=words):
            plan(*arguments)
        assert not ints.any()

    refused("kv_indptr must be a CUDA tensor, got cpu", kv_indptr=cpu[1])
    refused("qo_indptr must be on cuda", qo_indptr=cpu[0])
    refused("kv_indptr must be int32, got int64", kv_indptr=lengths[1].long())
    refused(r"kv_indptr must have shape \[4\], got \[3\]", batch_size=3)
    refused("pages need kv_last_page_len or kv_len", kv_last_page_len=None)
    refused("int_workspace must have at least", int_workspace=ints[:4096])
    refused("int_workspace must start at a multiple of 16", int_workspace=ints[8:])
    refused("int_workspace must be uint8 or int8", int_workspace=ints.view(torch.int32))
    refused("query heads must be a multiple of KV heads, got 8 and 3", heads=3)
    refused("no kernel of tiles of 16 rows for head_dim_qk 128 and head_dim_vo 72", dim=72)
    refused("no kernel of tiles of 17 rows", rows=17)
