# SPDX-License-Identifier: Apache-2.0
"""Wrappers that consist of others, on a GPU: numbers, graphs, plans that wait for nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_dense import I32, Pages, cache_of, causal, dense, indptr, pages_of

import precast
from precast._base.device import get_compute_capability
from precast.errors import BackendSupportedError

HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 128, 16, 600
SIZES = (HEADS, KV_HEADS, DIM, PAGE)
BF16 = torch.bfloat16
TYPES: dict[str, Any] = {"q_data_type": BF16}
MULTI = precast.MultiLevelCascadeAttentionWrapper
POD, BATCH_POD = precast.PODWithPagedKVCacheWrapper, precast.BatchPODWithPagedKVCacheWrapper
BSR, VARIABLE = precast.BlockSparseAttentionWrapper, precast.VariableBlockSparseAttentionWrapper


@pytest.fixture
def workspace() -> torch.Tensor:
    """May hold anything."""
    return torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device="cuda")


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """An error for what waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call, which has run before, and its results."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-2, atol=1e-2)


class Batch:
    """Requests in pages, on the CPU and on the GPU."""

    def __init__(self, q_lens: list[int], lens: list[int], seed: int = 1) -> None:
        g = torch.Generator().manual_seed(seed)
        self.q_lens, self.lens = q_lens, lens
        self.pages, _ = pages_of(lens, PAGE, torch.randperm(PAGES, generator=g))
        self.cpu_cache = cache_of([self.pages], PAGES, PAGE, KV_HEADS, DIM, g, BF16)
        self.cpu_q = torch.randn(sum(q_lens), HEADS, DIM, generator=g).to(BF16)
        self.q, self.cache = self.cpu_q.cuda(), self.cpu_cache.cuda()

    @property
    def rows(self) -> torch.Tensor:
        return indptr(self.q_lens).cuda()

    @property
    def table(self) -> tuple[torch.Tensor, ...]:
        return tuple(t.cuda() for t in self.pages.table)

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor(self.lens, dtype=I32, device="cuda")

    def expected(self, is_causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        states, row = [], 0
        for request, (n, m) in enumerate(zip(self.q_lens, self.lens)):
            tokens = self.pages.tokens(self.cpu_cache, request)
            mask = causal(n, m) if is_causal else None
            states.append(dense(self.cpu_q[row : row + n], *tokens, mask))
            row += n
        outs, lses = zip(*states)
        return torch.cat(outs), torch.cat(lses)


# -- cascade --------------------------------------------------------------------------------------


class Tree:
    """One prefix of all requests, one of each pair, tokens of their own."""

    def __init__(self, prefix: int, pairs: list[int], own: list[int], seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        free = torch.randperm(PAGES, generator=g)
        self.levels: list[Pages] = []
        for lens in ([prefix], pairs, own):
            level, free = pages_of(lens, PAGE, free)
            self.levels.append(level)
        self.count = len(own)
        self.cpu_cache = cache_of(self.levels, PAGES, PAGE, KV_HEADS, DIM, g, BF16)
        self.cpu_q = torch.randn(self.count, HEADS, DIM, generator=g).to(BF16)
        self.q, self.cache = self.cpu_q.cuda(), self.cpu_cache.cuda()

    @property
    def tables(self) -> list[list[torch.Tensor]]:
        n = self.count
        rows = [[n], [2] * (n // 2), [1] * n]
        first = [indptr(lens).cuda() for lens in rows]
        return [first, *([level.table[i].cuda() for level in self.levels] for i in range(3))]

    def expected(self) -> torch.Tensor:
        outs = []
        for i in range(self.count):
            parts = [
                level.tokens(self.cpu_cache, at) for level, at in zip(self.levels, (0, i // 2, i))
            ]
            k, v = (torch.cat(part) for part in zip(*parts))
            outs.append(dense(self.cpu_q[i : i + 1], k, v)[0])
        return torch.cat(outs)


TREES = [
    ("first", Tree, (1000, [70, 3], [200, 1, 33, 16], 1)),
    ("later", Tree, (17, [300, 64], [5, 90, 1, 700], 2)),
]


def trees() -> list[Tree]:
    return [kind(*given) for _, kind, given in TREES]


def test_levels_wait_for_nothing(workspace: torch.Tensor) -> None:
    first, later = trees()
    wrapper = MULTI(3, workspace)
    wrapper.plan(*first.tables, *SIZES, **TYPES)
    close(wrapper.run(first.q, first.cache), first.expected())
    tables = later.tables
    with no_waiting():
        wrapper.plan(*tables, *SIZES, **TYPES)
        out = wrapper.run(later.q, later.cache)
    close(out, later.expected())


def test_a_graph_of_levels_after_another_plan(workspace: torch.Tensor) -> None:
    first, later = trees()
    buffers = [[torch.zeros_like(t) for t in first.tables[i]] for i in (0, 1, 3)]
    buffers.insert(2, [torch.zeros(PAGES, dtype=I32, device="cuda") for _ in range(3)])
    wrapper = MULTI(3, workspace, "NHD", True, *buffers)
    wrapper.plan(*first.tables, *SIZES, **TYPES)
    q, cache = first.q.clone(), first.cache.clone()
    graph, out = captured(lambda: wrapper.run(q, cache))
    for tree in (first, later):
        wrapper.plan(*tree.tables, *SIZES, **TYPES)
        q.copy_(tree.q)
        cache.copy_(tree.cache)
        graph.replay()
        close(out, tree.expected())


def test_one_prefix_without_pages(workspace: torch.Tensor) -> None:
    batch = Batch([1, 1, 1], [70, 1, 300])
    shared = torch.randn(2, 500, KV_HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(BF16)
    decode = precast.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace)
    decode.begin_forward(*batch.table, *SIZES, data_type=BF16)
    prefill = precast.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace)
    prefill.begin_forward(batch.rows, *batch.table, *SIZES, q_data_type=BF16)
    want = []
    for i in range(3):
        tokens = batch.pages.tokens(batch.cpu_cache, i)
        k, v = (torch.cat(parts) for parts in zip(shared, tokens))
        want.append(dense(batch.cpu_q[i : i + 1], k, v)[0])
    for wrapper in (decode, prefill):
        out = wrapper.forward(batch.q, *shared.cuda(), batch.cache)  # type: ignore[attr-defined]
        close(out, torch.cat(want))


# -- prefill and decode at once -------------------------------------------------------------------

MIXED = [
    ([300, 1, 1, 40, 1], [300, 900, 17, 640, 1]),
    ([1, 1, 1, 1, 1], [33, 1200, 16, 5, 400]),
    ([64, 7, 1, 1, 128], [200, 7, 3, 2000, 128]),
]


@pytest.mark.parametrize("shape", MIXED, ids=str)
@pytest.mark.parametrize("on_host", [False, True])
def test_mixed_batches(shape: Any, on_host: bool) -> None:
    batch = Batch(*shape)
    rows, starts, pages, _ = batch.rows, *batch.table
    table = rows, starts, pages, batch.lengths
    if on_host:
        table = rows.cpu(), starts.cpu(), pages, batch.lengths.cpu()
    wrapper = precast.BatchAttention()
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, DIM, PAGE, causal=True)
    out, lse = wrapper.run(batch.q, batch.cache)
    want = batch.expected(is_causal=True)
    close(out, want[0])
    torch.testing.assert_close(lse.double().cpu(), want[1], rtol=1e-3, atol=1e-2)


def test_a_mixed_plan_and_run_are_captured_together() -> None:
    """With lengths on the device, which change between replays."""
    first, later = Batch(*MIXED[0]), Batch(*MIXED[2], seed=2)
    wrapper = precast.BatchAttention()
    table = [t.clone() for t in (first.rows, first.table[0], first.table[1], first.lengths)]
    pages = torch.zeros(PAGES, dtype=I32, device="cuda")
    pages[: len(table[2])] = table[2]
    table[2] = pages
    rows = max(len(first.q), len(later.q))
    q = torch.zeros(rows, HEADS, DIM, dtype=BF16, device="cuda")
    cache = first.cache.clone()

    def step() -> torch.Tensor:
        wrapper.plan(*table, HEADS, KV_HEADS, DIM, DIM, PAGE, causal=True)
        return wrapper.run(q, cache)[0]

    with no_waiting():
        step()
    graph, out = captured(step)
    for batch in (later, first):
        for buffer, source in zip(table, (batch.rows, *batch.table[:2], batch.lengths)):
            buffer[: len(source)] = source
        q[: len(batch.q)] = batch.q
        cache.copy_(batch.cache)
        graph.replay()
        close(out[: len(batch.q)], batch.expected(is_causal=True)[0])


# -- POD ------------------------------------------------------------------------------------------


def test_a_prefill_beside_a_decode(workspace: torch.Tensor) -> None:
    batch = Batch([1, 1, 1], [70, 0, 900])
    g = torch.Generator().manual_seed(4)
    q = torch.randn(200, HEADS, DIM, generator=g).to(BF16)
    k, v = torch.randn(2, 333, KV_HEADS, DIM, generator=g).to(BF16)
    wrapper = POD(workspace)
    wrapper.plan(*batch.table, *SIZES, **TYPES)
    given = q.cuda(), k.cuda(), v.cuda(), batch.q, batch.cache
    graph, results = captured(lambda: wrapper.run(*given, causal_p=True))
    graph.replay()
    with no_waiting():
        wrapper.run(*given, causal_p=True)
    close(results[0], dense(q, k, v, causal(200, 333))[0])
    close(results[1], batch.expected()[0])


def test_two_batches_beside_each_other(workspace: torch.Tensor) -> None:
    prefill, decode = Batch([300, 5], [300, 700]), Batch([1, 1, 1], [70, 0, 900], seed=2)
    wrapper = BATCH_POD(workspace)
    tables = [t for part in (prefill, decode) for t in (part.rows, *part.table)]
    with no_waiting():
        wrapper.plan(*tables, *SIZES, **TYPES)
    given = prefill.q, prefill.cache, decode.q, decode.cache
    for is_causal in (False, True):
        outs, _ = wrapper.run(*given, causal_p=is_causal, return_lse=True)
        close(outs[0], prefill.expected(is_causal)[0])
        close(outs[1], decode.expected()[0])
    pairs = sum(n * m for n, m in zip(prefill.q_lens, prefill.lens))
    everything = torch.ones(pairs, dtype=torch.bool, device="cuda")
    with no_waiting():
        masked = wrapper.run(*given, custom_mask_p=everything, causal_p=True)
    close(masked[0], prefill.expected()[0])


# -- block-sparse matrices ------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(64, 64), (1, 16), (16, 1), (5, 7), (128, 32)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_matrix_of_blocks(workspace: torch.Tensor, sizes: tuple[int, int], masked: bool) -> None:
    r, c = sizes
    block_rows, block_columns = 6, 9
    m, n = block_rows * r - r // 2, block_columns * c
    g = torch.Generator().manual_seed(5)
    blocks = torch.rand(block_rows, block_columns, generator=g) < 0.5
    bounds, columns = indptr(blocks.sum(1).tolist()), blocks.nonzero()[:, 1].to(I32)
    mask = torch.rand(len(columns), r, c, generator=g) < (0.7 if masked else 1.0)
    seen = torch.zeros(block_rows, block_columns, r, c, dtype=torch.bool)
    seen[blocks] = mask
    seen = seen.transpose(1, 2).reshape(block_rows * r, n)[:m]
    q = torch.randn(m, HEADS, DIM, generator=g).to(BF16)
    k, v = torch.randn(2, n, KV_HEADS, DIM, generator=g).to(BF16)
    wrapper = BSR(workspace)
    given = bounds.cuda(), columns.cuda()
    more = {"mask": mask.cuda()} if masked else {}
    heads = HEADS, KV_HEADS, DIM
    wrapper.plan(*given, m, n, r, c, *heads, **more, q_data_type=BF16, o_data_type=BF16)
    tensors = [tensor.cuda() for tensor in (q, k, v)]
    with no_waiting():
        out, lse = wrapper.run(*tensors, return_lse=True)
    want = dense(q, k, v, seen)
    close(out, want[0])
    torch.testing.assert_close(lse.double().cpu(), want[1], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("unit", [1, 16, 64])
def test_blocks_of_any_sizes(workspace: torch.Tensor, unit: int, heads: int) -> None:
    g = torch.Generator().manual_seed(6)
    rows = torch.tensor([[40, 1, 100], [70, 71, 0]])
    columns = unit * torch.tensor([[3, 1, 4, 2], [5, 0, 2, 3]])
    mask = torch.rand(2, 3, 4, generator=g) < 0.6
    q = torch.randn(heads, 141, DIM, generator=g).to(BF16)
    k, v = torch.randn(2, 2, 10 * unit, DIM, generator=g).to(BF16)
    wrapper = VARIABLE(workspace)
    wrapper.plan(mask.cuda(), rows.cuda(), columns.cuda(), heads, 2, DIM, **TYPES)
    given = q.cuda(), k.cuda(), v.cuda()
    graph, out = captured(lambda: wrapper.run(*given))
    graph.replay()
    for head in range(heads):
        kv = head // (heads // 2)
        seen = mask[kv].repeat_interleave(rows[kv], 0).repeat_interleave(columns[kv], 1)
        want = dense(*(x.unsqueeze(1) for x in (q[head], k[kv], v[kv])), seen)[0]
        close(out[head], want[:, 0])
    into = torch.full_like(given[0], torch.nan)
    assert torch.equal(wrapper.run(*given, into), out)


# -- what chooses kernels -------------------------------------------------------------------------


def test_fa3_is_for_hopper(workspace: torch.Tensor) -> None:
    batch = Batch([300, 5], [300, 700])
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper
    if get_compute_capability() != (9, 0):
        with pytest.raises(BackendSupportedError, match="backend='fa3' is for compute capability"):
            wrapper(workspace, backend="fa3")
        return
    results = []
    for backend in ("fa2", "fa3"):
        made = wrapper(workspace, backend=backend)
        made.plan(batch.rows, *batch.table, *SIZES, causal=True, **TYPES)
        results.append(made.run(batch.q, batch.cache))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
    assert made._plan.shape.sm90


def test_sinks_by_position(workspace: torch.Tensor) -> None:
    batch = Batch([300, 5], [300, 700])
    sink = torch.randn(HEADS, generator=torch.Generator().manual_seed(7)).cuda()
    kinds = ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", ""
    jit_args = ["uri", BF16, BF16, BF16, I32, DIM, DIM, *kinds]
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace, jit_args=jit_args)
    wrapper.plan(batch.rows, *batch.table, *SIZES, causal=True, **TYPES)
    got = wrapper.run(batch.q, batch.cache, sink, DIM**-0.5)
    assert torch.equal(got, wrapper.run(batch.q, batch.cache, sinks=sink))
