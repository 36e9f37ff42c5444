# SPDX-License-Identifier: Apache-2.0
"""Decodes that start before the kernel before them has ended: what that kernel writes counts.

The kernel before is a plan, which lets the next kernel start as soon as it has started itself, and
copies the tables of its wrapper into buffers, which the decode then reads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu_attention import BF16, HEADS, I32, KV_HEADS, PAGE, PLAN, SHAPE, Batch, graphed

import precast

ROUNDS = 30
PAGES = 250
LENGTHS = ([3000], [1], [257], [64, 2000, 900], [1, 1, 4000], [0, 17, 33])


@pytest.fixture
def workspace() -> torch.Tensor:
    """May hold anything."""
    return torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device="cuda")


def captured(call: Any) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("count", [1, 3])
def test_a_plan_right_before(
    count: int, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    """In one graph each run follows the plan of other lengths and pages."""
    batches = [Batch(lens, generator) for lens in LENGTHS if len(lens) == count]
    q, cache = batches[0].q, batches[0].cache
    wrapper = graphed(workspace, batches[0])
    outs = [torch.empty_like(q) for _ in batches]
    want = []
    for batch in batches:
        wrapper.plan(*batch.table, *SHAPE, **PLAN)
        torch.cuda.synchronize()
        want.append(wrapper.run(q, cache, enable_pdl=False))

    def call() -> None:
        for batch, out in zip(batches, outs, strict=True):
            wrapper.plan(*batch.table, *SHAPE, **PLAN)
            wrapper.run(q, cache, out=out)

    graph = captured(call)
    for _ in range(ROUNDS):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out, expected in zip(outs, want, strict=True):
            assert torch.equal(out, expected)


@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [1, 4, 200])
def test_lengths_and_pages_right_before(
    count: int, kv_dtype: torch.dtype, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    """Calls without a plan read lengths and a block table that the kernel before copies."""
    width = PAGES // min(count, 4)
    q = torch.randn(count, HEADS, 128, device="cuda", generator=generator).to(BF16)
    cache = torch.randn(2, PAGES, PAGE, KV_HEADS, 128, device="cuda", generator=generator)
    k, v = cache.to(kv_dtype)
    tables, lens = [], []
    for i in range(3):
        order = torch.randint(PAGES, (count * width,), device="cuda", generator=generator)
        tables.append(order.to(I32))
        most = width * PAGE if i != 1 else 20
        lens.append(torch.randint(most, (count,), device="cuda", generator=generator).to(I32))
    starts = torch.arange(count + 1, dtype=I32, device="cuda") * width
    writer = precast.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda"),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(count + 1, dtype=I32, device="cuda"),
        paged_kv_indices_buffer=torch.zeros(count * width, dtype=I32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.zeros(count, dtype=I32, device="cuda"),
    )
    table = writer._paged_kv_indices_buf.view(count, width)
    length = writer._paged_kv_last_page_len_buf
    options = {"bmm1_scale": 0.1, "kv_layout": "NHD"}

    def decode(table: torch.Tensor, length: torch.Tensor, **more: Any) -> torch.Tensor:
        return precast.xqa_batch_decode_with_kv_cache(
            q, (k, v), workspace, table, length, width * PAGE, **options, **more
        )

    outs = [torch.empty_like(q) for _ in lens]
    want = []
    for each, size in zip(tables, lens, strict=True):
        want.append(decode(each.view(count, width), size, enable_pdl=False))
        torch.cuda.synchronize()

    def call() -> None:
        for each, size, out in zip(tables, lens, outs, strict=True):
            writer.plan(starts, each, size, *SHAPE, **PLAN)
            decode(table, length, out=out)

    graph = captured(call)
    for _ in range(ROUNDS):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out, expected in zip(outs, want, strict=True):
            assert torch.equal(out, expected)
