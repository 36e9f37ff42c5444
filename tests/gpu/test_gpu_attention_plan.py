# SPDX-License-Identifier: Apache-2.0
"""Test the plans of attention that the GPU makes: every tile once, in splits that fit together.

``Schedule`` is a second implementation of the tile scheduler in ``scheduler.cuh``, which reads what
the kernel wrote. The formulas of a plan are tested on the CPU, by
``tests/build/test_attention_schedule.py``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from plan_calls import function, launch, lengths_by_name, options_of, packed
from plan_layout import constant, read, size_of

from precast._ops.attention.plan import PlanShape, new_block

BLOCK = constant("kKvBlockSize")
DIM = 128


class Shape(NamedTuple):
    """What a plan depends on besides lengths."""

    block_m: int = 16
    heads: int = 2
    group: int = 4
    causal: bool = False
    window_left: int = -1
    page_size: int = 16
    fixed_split_size: int = -1
    disable_split_kv: bool = False

    def planned(self, batch: int, q_len: int) -> PlanShape:
        return PlanShape(
            batch_size=batch,
            q_len_per_req=q_len,
            page_size=self.page_size,
            num_qo_heads=self.heads * self.group,
            num_kv_heads=self.heads,
            head_dim_qk=DIM,
            head_dim_vo=DIM,
            kv_bytes=2,
            block_m=self.block_m,
            causal=self.causal,
            window_left=self.window_left,
            fixed_split_size=self.fixed_split_size,
            disable_split_kv=self.disable_split_kv,
        )

    def tokens(self, q_len: int, kv_len: int, tile: int) -> tuple[int, int]:
        """The tokens that the rows of a tile attend to, from the start of a KV block on."""
        rows = range(tile * self.block_m, min((tile + 1) * self.block_m, q_len * self.group))
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
    block = new_block(shape.planned(len(batch.q_lens), q_len))
    function("workspace_size")(*lengths, out, block, sm_count)
    return out.tolist()


def ctas_of(block_m: int) -> int:
    """The number of CTAs, from the workspace of one tile: two partial results for each CTA."""
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    size = sizes_of(Shape(block_m), Batch([1], [100_000]), sm_count)[0]
    return size // (2 * 4 * block_m * (DIM + 2))


class WorkTile(NamedTuple):
    tile: tuple[int, int, int]
    begin: int
    end: int
    split_idx: int
    num_splits: int
    partial: int
    counter: int


class Schedule:
    """The work tiles of a plan."""

    def __init__(self, plan: torch.Tensor, shape: Shape, batch: Batch, ctas: int) -> None:
        self.ints, self.shape, self.ctas = plan.tolist(), shape, ctas
        self.counters = size_of("PlanHeader")
        self.starts = self.counters + -(-ctas // 4) * 4
        self.requests = self.starts + size_of("CtaStart") * (ctas + 1)
        header = read(self.ints, "PlanHeader")
        self.is_static, self.split_size = header["mode"], header["split_size"]
        self.num_requests, self.num_tiles = header["num_requests"], header["num_tiles"]
        self.num_entries, self.entries = header["num_entries"], header["entries_offset"]
        self.tile_counters = header["counters_offset"]
        self.num_partials, self.num_ints = header["num_partials"], header["num_ints"]
        self.batch = batch

    def request(self, planned_idx: int) -> tuple[int, int, int]:
        it = self.at(self.requests, planned_idx, "PlannedRequest")
        request_idx, q_len, kv_len = it["request_idx"], it["q_len"], it["kv_len"]
        assert it["q_begin"] == sum(self.batch.q_lens[:request_idx])
        page = self.shape.page_size or 1
        assert it["kv_start"] == sum(-(-n // page) for n in self.batch.kv_lens[:request_idx])
        assert (q_len, kv_len) == (self.batch.q_lens[request_idx], self.batch.kv_lens[request_idx])
        return request_idx, q_len * self.shape.group, it["tiles_before"]

    def at(self, base: int, index: int, struct: str) -> dict[str, int]:
        return read(self.ints, struct, base + index * size_of(struct))

    def work_tiles(self) -> Iterator[WorkTile]:
        return self.static_persistent() if self.is_static else self.stream_k()

    def static_persistent(self) -> Iterator[WorkTile]:
        heads = self.shape.heads
        for entry_idx in range(self.num_entries):
            entry = self.at(self.entries, entry_idx, "WorkTileEntry")
            m_block, split_idx = entry["m_block"], entry["split_idx"]
            request_idx, _, before = self.request(entry["planned_idx"])
            lengths = self.batch.q_lens[request_idx], self.batch.kv_lens[request_idx]
            begin, end = self.shape.tokens(*lengths, m_block)
            num_splits = 1
            if self.split_size and begin < end:
                first = begin // self.split_size
                num_splits = (end - 1) // self.split_size - first + 1
                limit = (first + split_idx + 1) * self.split_size
                begin, end = max(begin, (first + split_idx) * self.split_size), min(end, limit)
            for head in range(heads):
                counter = self.tile_counters + (before + m_block) * heads + head
                partial = (entry["first_partial"] + split_idx) * heads + head
                tile = request_idx, head, m_block
                yield WorkTile(tile, begin, end, split_idx, num_splits, partial, counter)

    def start(self, cta: int) -> list[int]:
        of = self.at(self.starts, cta, "CtaStart")
        names = "planned_idx", "head", "m_block", "n_block", "first_cta", "num_splits"
        return [of[name] for name in names]

    def stream_k(self) -> Iterator[WorkTile]:
        for cta in range(self.ctas):
            planned_idx, head, m_block, n_block, first_cta, num_splits = self.start(cta)
            end = self.start(cta + 1)
            while (planned_idx, head, m_block, n_block) != tuple(end[:4]):
                request_idx, rows, _ = self.request(planned_idx)
                lengths = self.batch.q_lens[request_idx], self.batch.kv_lens[request_idx]
                begin, last = self.shape.tokens(*lengths, m_block)
                ends_here = [planned_idx, head, m_block] == end[:3]
                if n_block == 0:
                    first_cta, num_splits = (end[4], end[5]) if ends_here else (cta, 1)
                if ends_here:
                    last = begin + end[3] * BLOCK
                partial = 2 * cta + (cta == first_cta)
                counter = self.counters + first_cta
                tile = request_idx, head, m_block
                first, split_idx = begin + n_block * BLOCK, cta - first_cta
                yield WorkTile(tile, first, last, split_idx, num_splits, partial, counter)
                if ends_here:
                    break
                n_block, m_block = 0, m_block + 1
                if m_block * self.shape.block_m >= rows:
                    m_block, planned_idx = 0, planned_idx + 1
                if planned_idx == self.num_requests:
                    planned_idx, head = 0, head + 1


def check(schedule: Schedule) -> None:
    found: dict[tuple[int, int, int], list[WorkTile]] = defaultdict(list)
    for work in schedule.work_tiles():
        found[work.tile].append(work)
    shape, batch = schedule.shape, schedule.batch
    want = {
        (request, head, m_block)
        for request, q_len in enumerate(batch.q_lens)
        for head in range(shape.heads)
        for m_block in range(-(-q_len * shape.group // shape.block_m))
    }
    assert found.keys() == want
    partials: list[int] = []
    counters: list[int] = []
    for (request, _, m_block), splits in found.items():
        splits.sort(key=lambda work: work.split_idx)
        assert [work.split_idx for work in splits] == list(range(splits[0].num_splits))
        assert {work.num_splits for work in splits} == {len(splits)}
        begin, end = shape.tokens(batch.q_lens[request], batch.kv_lens[request], m_block)
        borders = [begin, *(work.end for work in splits)]
        assert [work.begin for work in splits] == borders[:-1]
        assert borders[-1] == end
        assert len(splits) == 1 or all(a < b for a, b in itertools.pairwise(borders))
        if len(splits) > 1:
            partials += [work.partial for work in splits]
            counters.append(splits[0].counter)
            assert {work.counter for work in splits} == set(counters[-1:])
    assert len(set(partials)) == len(partials)
    assert len(set(counters)) == len(counters)
    assert all(0 <= partial < schedule.num_partials for partial in partials)
    assert all(schedule.ints[counter] == 0 for counter in counters), "counters start at 0"


def planned(shape: Shape, batch: Batch, by_kv_len: bool = False, q_len: int = 0) -> Schedule:
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
    workspaces = {"int_workspace": buffer[:ints], "float_workspace": space}
    planned_shape = shape.planned(len(batch.q_lens), q_len)
    launch(packed(planned_shape, **lengths_by_name(lengths), **workspaces), buffer[:ints])
    assert torch.equal(buffer[ints:], before[ints:]), "a plan wrote past its workspace"
    ctas = ctas_of(shape.block_m)
    schedule = Schedule(buffer[: ints // 4 * 4].view(torch.int32), shape, batch, ctas)
    assert schedule.num_ints * 4 <= ints
    assert schedule.num_partials * 4 * shape.block_m * (DIM + 2) <= max(floats, 16)
    return schedule


def random_batch(count: int, most_q: int, most_kv: int, g: torch.Generator) -> Batch:
    def draw(most: int) -> list[int]:
        return torch.randint(most + 1, (count,), device=g.device, generator=g).tolist()

    return Batch(draw(most_q), draw(most_kv))


SHAPES = {
    "plain": Shape(),
    "causal": Shape(causal=True, block_m=64),
    "128 rows": Shape(causal=True, block_m=128, group=8),
    "window": Shape(window_left=100, causal=True, group=3),
    "ragged": Shape(page_size=0, block_m=64),
    "pages of one": Shape(page_size=1, heads=5),
    "splits": Shape(fixed_split_size=16),
    "causal splits": Shape(fixed_split_size=8, causal=True, block_m=64, window_left=700),
    "no splits": Shape(disable_split_kv=True),
    "no splits, 128 rows": Shape(disable_split_kv=True, causal=True, block_m=128),
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
    for name in ("plain", "window", "splits", "no splits"):
        check(planned(SHAPES[name], Batch([q_len] * 33, kv_lens), q_len=q_len))


def test_no_requests() -> None:
    for name in ("plain", "128 rows", "splits", "no splits"):
        schedule = planned(SHAPES[name], Batch([], []))
        assert list(schedule.work_tiles()) == []


def test_many_tiles_are_sorted(generator: torch.Generator) -> None:
    """More tiles than the kernel keeps in shared memory; the longest come first."""
    shape = Shape(causal=True, block_m=64, heads=1)
    batch = Batch([40_000, 3], [40_000, 50])
    schedule = planned(shape, batch)
    assert schedule.is_static
    assert schedule.num_tiles > constant("kMaxTilesInShared")
    check(schedule)
    lengths = [work.end - work.begin for work in schedule.static_persistent()]
    coarse = -(-max(lengths) // 1000)
    assert all(b <= a + 2 * coarse + BLOCK for a, b in itertools.pairwise(lengths))


def test_splits_grow_if_the_workspace_is_small() -> None:
    """The GPU cannot raise the error that the host would have raised."""
    shape, batch = SHAPES["splits"], Batch([1] * 8, [5000] * 8)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    floats, ints, _ = sizes_of(shape, batch, sm_count)
    lengths = [None if t is None else t.cuda() for t in batch.tensors(shape, False, 0)]
    buffer = torch.empty(ints, dtype=torch.uint8, device="cuda")
    space = torch.empty(floats // 3, dtype=torch.uint8, device="cuda")
    workspaces = {"int_workspace": buffer, "float_workspace": space}
    launch(packed(shape.planned(8, 0), **lengths_by_name(lengths), **workspaces), buffer)
    plan = buffer[: ints // 4 * 4].view(torch.int32)
    schedule = Schedule(plan, shape, batch, ctas_of(16))
    assert schedule.split_size > 16 * 16
    check(schedule)


def test_in_a_graph_with_other_lengths(generator: torch.Generator) -> None:
    shape = SHAPES["causal"]
    batches = [random_batch(9, 40, 3000, generator) for _ in range(4)]
    ints = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    space = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    lengths = [None if t is None else t.cuda() for t in batches[0].tensors(shape, False, 0)]
    workspaces = {"int_workspace": ints, "float_workspace": space}
    block = packed(shape.planned(9, 0), **lengths_by_name(lengths), **workspaces)
    launch(block, ints)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        import tvm_ffi

        with tvm_ffi.use_torch_stream(torch.cuda.current_stream()):
            launch(block, ints)
    for batch in batches:
        for held, new in zip(lengths, batch.tensors(shape, False, 0), strict=True):
            if held is not None:
                held.copy_(new)
        graph.replay()
        check(Schedule(ints.view(torch.int32), shape, batch, ctas_of(64)))


def test_errors() -> None:
    shape, batch = SHAPES["plain"].planned(2, 0), Batch([1, 1], [100, 200])
    ints = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    cpu = batch.tensors(SHAPES["plain"], False, 0)
    lengths = [None if t is None else t.cuda() for t in cpu]
    good = {"int_workspace": ints, "float_workspace": ints.clone(), **lengths_by_name(lengths)}

    def rejected(words: str, **changes: Any) -> None:
        numbers = {name: changes.pop(name) for name in PlanShape._fields if name in changes}
        with pytest.raises(ValueError, match=f"pack_plan: {words}"):
            packed(shape._replace(**numbers), **{**good, **changes})
        assert not ints.any()

    rejected("kv_indptr must be a CUDA tensor", kv_indptr=cpu[1])
    rejected("qo_indptr must be on cuda", qo_indptr=cpu[0])
    rejected("kv_indptr must be int32, got int64", kv_indptr=lengths[1].long())
    rejected(r"kv_indptr must have shape \[4\], got \[3\]", batch_size=3)
    rejected("pages need kv_last_page_len or kv_len", kv_last_page_len=None)
    rejected("int_workspace must have at least", int_workspace=ints[:4096])
    rejected("int_workspace must start at a multiple of 16", int_workspace=ints[8:])
    rejected("int_workspace must be uint8 or int8", int_workspace=ints.view(torch.int32))
    rejected("query heads must be a multiple of KV heads, got 8 and 3", num_kv_heads=3)
    rejected(
        "there is no kernel of tiles of 16 rows for head_dim_qk 128 and head_dim_vo 72",
        head_dim_vo=72,
    )
    rejected("there is no kernel of tiles of 17 rows", block_m=17)

    block = packed(shape, **good)
    with pytest.raises(ValueError, match=r"plan: int_workspace must be the one that pack_plan"):
        launch(block, ints.clone())
    with pytest.raises(ValueError, match=r"plan: block must be filled by pack_plan\(\) of this"):
        launch(new_block(shape), ints)
    assert not ints.any()


def test_errors_of_masks() -> None:
    """One of all tokens has one dimension and bounds, one of drafts a row for each query."""
    shape = SHAPES["plain"].planned(2, 0)._replace(rows=4, causal=False)
    ints = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    lengths = Batch([1, 3], [100, 200]).tensors(SHAPES["plain"], False, 0)
    on_gpu = lengths_by_name([None if t is None else t.cuda() for t in lengths])
    good = {"int_workspace": ints, "float_workspace": ints.clone(), **on_gpu}
    options, mask = options_of(shape, mask_mode=2), torch.zeros(8, 8, dtype=torch.uint8).cuda()
    for wrong, words in (
        (None, "a custom mask needs packed_mask, got None"),
        (mask[0], "a custom mask needs mask_indptr, got None"),
        (mask[:3], r"packed_mask must have shape \[4, bytes\], got \[3, 8\]"),
        (mask[:4, :0], r"packed_mask must have shape \[4, bytes\], got \[4, 0\]"),
        (mask[:4, :4], "packed_mask must be contiguous"),
        (mask[:4].int(), "packed_mask must be uint8, got int32"),
        (mask[:4].cpu(), "packed_mask must be on cuda"),
        (ints[:32].view(4, 8), "int_workspace must not overlap packed_mask's memory"),
    ):
        with pytest.raises(ValueError, match=f"pack_plan: {words}"):
            packed(shape, options, **good, packed_mask=wrong)
    packed(shape, options, **good, packed_mask=mask[:4])
    assert not ints.any()


def test_errors_of_kernels_that_plan_themselves() -> None:
    """They take what one tile of each request is enough for, and no plan."""
    plain, ints = SHAPES["plain"], torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    shape = Shape().planned(2, 1)._replace(plans_itself=True)
    lengths = Batch([1, 1], [100, 200]).tensors(plain, True, 1)
    on_gpu = lengths_by_name([None if t is None else t.cuda() for t in lengths])
    floats = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    good = {"int_workspace": ints, "float_workspace": floats, **on_gpu}

    def rejected(words: str, changed: PlanShape = shape, **tensors: Any) -> None:
        with pytest.raises(ValueError, match=f"pack_plan: {words}"):
            packed(changed, **{**good, **tensors})

    needs = "plans_itself needs tiles of 16 rows, one a request, .* at most 256 requests"
    rejected(needs, shape._replace(block_m=64))
    rejected(needs, shape._replace(q_len_per_req=5))
    rejected(needs, shape._replace(fixed_split_size=4))
    rejected(needs, shape._replace(disable_split_kv=True))
    rejected(needs, float_workspace=floats[: 1 << 20])
    rejected(needs, shape._replace(q_len_per_req=0), qo_indptr=torch.arange(3).int().cuda())
    rejected("int_workspace must have at least", int_workspace=ints[:64])
    block = packed(shape, **good)
    with pytest.raises(ValueError, match=r"plan: block must be of a batch whose kernels need a"):
        launch(block, ints)
    assert not ints.any()
