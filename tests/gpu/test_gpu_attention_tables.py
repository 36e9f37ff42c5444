# SPDX-License-Identifier: Apache-2.0
"""Tables that the launch of a plan copies into the buffers of a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_calls import launch, packed

import precast
from precast._ops.attention.plan import PlanShape

I32 = torch.int32
GUARD = -7
NAMES = ["qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices"]


def shape(batch: int) -> PlanShape:
    """Of tiles of 16 rows, which a plan takes in one order."""
    return PlanShape(
        batch_size=batch,
        page_size=16,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim_qk=128,
        head_dim_vo=128,
        kv_bytes=2,
        block_m=16,
        causal=True,
    )


def tables(batch: int, indices: int, generator: torch.Generator) -> list[torch.Tensor]:
    def drawn(count: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(
            low, high, (count,), device="cuda", generator=generator, dtype=torch.int64
        )

    def starts(counts: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(I32)

    return [
        starts(drawn(batch, 0, 90)),
        starts(drawn(batch, 1, 40)),
        drawn(batch, 1, 17).to(I32),
        drawn(indices, 0, 1 << 30).to(I32),
    ]


def workspaces() -> list[torch.Tensor]:
    """Filled, so that what a plan leaves alone is the same of two plans."""
    return [torch.full((size,), 1, dtype=torch.uint8, device="cuda") for size in (8 << 20, 1 << 26)]


def planned(given: list[torch.Tensor]) -> torch.Tensor:
    ints, floats = workspaces()
    batch = given[2].numel()
    tables_by_name = dict(zip(NAMES, given, strict=True))
    memory = {"int_workspace": ints, "float_workspace": floats}
    launch(packed(shape(batch), **tables_by_name, **memory), ints)
    return ints


def filled(given: list[torch.Tensor], buffers: list[torch.Tensor], batch: int) -> torch.Tensor:
    """The plan of buffers into which its launch copies what is not in them."""
    ints, floats = workspaces()
    held = dict(zip(NAMES, buffers, strict=True))
    block = packed(shape(batch), **held, int_workspace=ints, float_workspace=floats)
    sources = {
        name: table
        for name, table in zip(NAMES, given, strict=True)
        if table.data_ptr() != held[name].data_ptr()
    }
    launch(block, ints, **sources)
    return ints


@pytest.mark.parametrize(
    ("batch", "indices"), [(1, 1), (3, 0), (64, 5), (64, 2048), (64, 100_003), (700, 3_000_001)]
)
def test_all_tables(batch: int, indices: int, generator: torch.Generator) -> None:
    given = tables(batch, indices, generator)
    more = [0, 0, 0, 5]  # Buffers of pages are longer than what is copied.
    buffers = [
        torch.full((t.numel() + n,), GUARD, dtype=I32, device="cuda") for t, n in zip(given, more)
    ]
    assert torch.equal(filled(given, buffers, batch), planned(given))
    for name, table, buffer in zip(NAMES, given, buffers):
        assert torch.equal(buffer[: table.numel()], table), name
        assert (buffer[table.numel() :] == GUARD).all(), name


@pytest.mark.parametrize("filled_one", range(4))
def test_a_table_that_is_in_its_place(filled_one: int, generator: torch.Generator) -> None:
    given = tables(33, 4000, generator)
    buffers = [torch.full_like(table, GUARD) for table in given]
    buffers[filled_one] = given[filled_one]
    assert torch.equal(filled(given, buffers, 33), planned(given))
    for table, buffer in zip(given, buffers):
        assert torch.equal(buffer, table)


def test_errors(generator: torch.Generator) -> None:
    given = tables(4, 9, generator)
    buffers = [torch.full_like(table, GUARD) for table in given]
    ints, floats = workspaces()
    held = dict(zip(NAMES, buffers, strict=True))
    held["kv_indices"] = held["kv_indices"][:8]
    block = packed(shape(4), **held, int_workspace=ints, float_workspace=floats)

    def rejected(words: str, **sources: Any) -> None:
        with pytest.raises(ValueError, match=f"plan: {words}"):
            launch(block, ints, **sources)
        assert all((buffer == GUARD).all() for buffer in buffers)
        assert (ints == 1).all()

    rejected("kv_indices must have at most the 8 elements of its buffer", kv_indices=given[3])
    rejected("kv_last_page_len must be int32, got int64", kv_last_page_len=given[2].long())
    rejected("kv_indices must be on cuda", kv_indices=given[3].cpu())
    rejected("qo_indptr must be on cuda", qo_indptr=given[0].cpu())
    strided = torch.zeros(8, 2, dtype=I32, device="cuda")[:, 0]
    rejected("kv_indices must be contiguous", kv_indices=strided)
    rejected(r"kv_indptr must have shape \[5\], got \[4\]", kv_indptr=given[1][:4])
    with pytest.raises(ValueError, match="int_workspace must have at least"):
        packed(shape(4), **held, int_workspace=ints[:256], float_workspace=floats)


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
def test_buffers_of_wrappers(kind: str, where: str, generator: torch.Generator) -> None:
    """Planned twice, the second time for less; what is behind the copies stays."""
    space = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    batch = 5
    big, small = tables(batch, 300, generator), tables(batch, 40, generator)
    if kind == "decode":
        big[0] = small[0] = torch.arange(batch + 1, device="cuda", dtype=I32)
    buffers = [torch.full_like(table, GUARD) for table in big]
    sizes, options = (8, 2, 128), {"q_data_type": torch.bfloat16}
    chosen = [0, 1] if kind == "ragged" else [1, 3, 2] if kind == "decode" else [0, 1, 3, 2]
    held = [buffers[i] for i in chosen]
    if kind == "decode":
        wrapper: Any = precast.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", True, True, *held)
    elif kind == "paged":
        wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", True, *held)
    else:
        wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", True, *held)
    for given in (big, small):
        if given is small:
            small[0] = torch.minimum(small[0], big[0])  # Not more rows than in the first plan.
        page = () if kind == "ragged" else (16,)
        wrapper.plan(*(given[i].to(where) for i in chosen), *sizes, *page, **options)
        torch.cuda.synchronize()
        for i in chosen:
            assert torch.equal(buffers[i][: given[i].numel()], given[i])
    if kind != "ragged":
        assert torch.equal(buffers[3][40:], big[3][40:])


def test_rows_of_no_request_in_a_graph(generator: torch.Generator) -> None:
    """A graph for twelve queries runs by a plan for seven: what is behind them is 0."""
    space = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    q = torch.randn(12, 8, 64, device="cuda", generator=generator).bfloat16()
    cache = torch.randn(6, 2, 16, 2, 64, device="cuda", generator=generator).bfloat16()

    def table(*q_lens: int) -> list[torch.Tensor]:
        starts = torch.tensor([0, *q_lens], device="cuda").cumsum(0).to(I32)
        pages = torch.arange(len(q_lens) + 1, device="cuda", dtype=I32)
        return [starts, pages, pages[1:].clone(), torch.full_like(pages[1:], 16)]

    first, later = table(5, 7), table(3, 4)
    buffers = [torch.zeros_like(t) for t in first]
    kind: Any = precast.BatchPrefillWithPagedKVCacheWrapper
    wrapper = kind(space, "NHD", True, *buffers)
    sizes, options = (8, 2, 64, 16), {"causal": True, "q_data_type": torch.bfloat16}
    wrapper.plan(*first, *sizes, **options)
    wrapper.run(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, cache)
    wrapper.plan(*later, *sizes, **options)
    out.fill_(torch.nan)
    graph.replay()
    plain = kind(space)
    plain.plan(*later, *sizes, **options)
    torch.testing.assert_close(out[:7], plain.run(q[:7], cache), rtol=1e-2, atol=1e-2)
    assert not out[7:].any()
