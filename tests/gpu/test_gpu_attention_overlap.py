# SPDX-License-Identifier: Apache-2.0
"""Parts of a wrapper whose kernels overlap: they read what kernels before them write, and kernels
behind them read what both have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_dense import indptr, pages_of

import precast
from precast._ops.attention import run as runs

HEADS, KV_HEADS, DIM, PAGE, PAGES = 16, 4, 128, 16, 1600
SIZES = (HEADS, KV_HEADS, DIM, PAGE)
BF16 = torch.bfloat16
TYPES: dict[str, Any] = {"q_data_type": BF16}
ROUNDS = 40

Outputs = tuple[torch.Tensor, ...]


@pytest.fixture
def workspace() -> torch.Tensor:
    return torch.full((128 << 20,), 0xFF, dtype=torch.uint8, device="cuda")


class Inputs:
    """What runs read, and other numbers for each round."""

    def __init__(self, rows: list[int]) -> None:
        g = torch.Generator("cuda").manual_seed(7)
        shapes = [(n, HEADS, DIM) for n in rows] + [(PAGES, 2, PAGE, KV_HEADS, DIM)]
        self.sources = [
            [torch.randn(s, device="cuda", generator=g).to(BF16) for s in shapes] for _ in range(3)
        ]
        self.now = [torch.empty_like(t) for t in self.sources[0]]

    def write(self, number: int) -> None:
        """By kernels that let the next one start at once."""
        for source, now in zip(self.sources[number % 3], self.now):
            precast.scale(source, 1.0, out=now, enable_pdl=True)

    def spoil(self) -> None:
        for now in self.now:
            precast.scale(now, float("nan"), out=now, enable_pdl=True)


def check(inputs: Inputs, run: Callable[[bool], Outputs]) -> None:
    """Overlapping runs give bit for bit what runs without PDL give."""
    expected = []
    for number in range(3):
        inputs.write(number)
        torch.cuda.synchronize()
        expected.append([t.clone() for t in run(False)])
        torch.cuda.synchronize()
    kept = [[torch.empty_like(t) for t in expected[0]] for _ in range(ROUNDS)]

    def rounds() -> None:
        for number, copies in enumerate(kept):
            inputs.write(number)
            outputs = run(True)
            for output, copy in zip(outputs, copies):
                precast.scale(output, 1.0, out=copy, enable_pdl=True)
            inputs.spoil()

    rounds()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    _compare(kept, expected)
    with torch.cuda.graph(graph):
        rounds()
    for _ in range(5):
        graph.replay()
    _compare(kept, expected)


def _compare(kept: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for number, copies in enumerate(kept):
        for at, copy in enumerate(copies):
            assert torch.equal(copy, expected[number % 3][at]), f"round {number}, output {at}"
            copy.zero_()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What exports took as ``enable_pdl`` from parts."""
    taken: list[Any] = []
    original = runs._overlapping

    def spied(*args: Any) -> Any:
        taken.append(original(*args))
        return taken[-1]

    monkeypatch.setattr(runs, "_overlapping", spied)
    return taken


@pytest.mark.parametrize(
    "prefill, decode",
    [
        ([(3000, 6000)], [40, 7]),  # The decode ends first.
        ([(100, 130), (1, 1)], [9000, 3000, 1, 64]),  # The prefill ends first.
        ([(3, 3), (5, 700)], [17] * 30),
        ([(900, 900)] * 4, [2000] * 8),
    ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_prefill_and_a_decode(
    workspace: torch.Tensor,
    launches: list[Any],
    prefill: list[tuple[int, int]],
    decode: list[int],
    is_causal: bool,
) -> None:
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))
    of_prefill, free = pages_of([m for _, m in prefill], PAGE, free)
    of_decode, _ = pages_of(decode, PAGE, free)
    rows = [n for n, _ in prefill], [1] * len(decode)
    inputs = Inputs([sum(n) for n in rows])
    q_p, q_d, cache = inputs.now
    wrapper = precast.BatchPODWithPagedKVCacheWrapper(workspace)
    tables = [
        (indptr(n).cuda(), *(t.cuda() for t in pages.table))
        for n, pages in zip(rows, (of_prefill, of_decode))
    ]
    wrapper.plan(*tables[0], *tables[1], *SIZES, **TYPES)

    def run(pdl: bool) -> Outputs:
        outs, lses = wrapper.run(
            q_p, cache, q_d, cache, causal_p=is_causal, return_lse=True, enable_pdl=pdl
        )
        return *outs, *lses

    check(inputs, run)
    assert launches[-2:] == [runs.WITH_NEXT, runs.WITH_PREVIOUS]


@pytest.mark.parametrize("use_cuda_graph", [False, True])
@pytest.mark.parametrize("prefix, own", [(8000, [200] * 40), (64, [3000, 1, 64, 700])])
def test_two_levels(
    workspace: torch.Tensor,
    launches: list[Any],
    prefix: int,
    own: list[int],
    use_cuda_graph: bool,
) -> None:
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(2))
    shared, free = pages_of([prefix], PAGE, free)
    below, _ = pages_of(own, PAGE, free)
    count = len(own)
    bounds = [indptr([count]).cuda(), indptr([1] * count).cuda()]
    levels = [[level.table[i].cuda() for level in (shared, below)] for i in range(3)]
    buffers: tuple[Any, ...] = ()
    if use_cuda_graph:
        buffers = (True, *([t.clone() for t in tensors] for tensors in (bounds, *levels)))
    wrapper = precast.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD", *buffers)
    wrapper.plan(bounds, *levels, *SIZES, **TYPES)
    inputs = Inputs([count])
    q, cache = inputs.now
    parts = wrapper._batch_prefill_wrappers

    def run(pdl: bool) -> Outputs:
        before = [part._overlap for part in parts]
        if not pdl:
            for part in parts:
                part._overlap = 0
        try:
            return (wrapper.run(q, cache),)
        finally:
            for part, overlap in zip(parts, before):
                part._overlap = overlap

    check(inputs, run)
    assert launches[-2:] == [runs.WITH_NEXT, runs.WITH_PREVIOUS]


def test_a_part_without_queries(workspace: torch.Tensor, launches: list[Any]) -> None:
    """Nothing is launched for it, so that the other part has to wait for what comes before."""
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3))
    of_prefill, free = pages_of([4000], PAGE, free)
    of_decode, _ = pages_of([900, 30], PAGE, free)
    inputs = Inputs([0, 2])
    q_p, q_d, cache = inputs.now
    wrapper = precast.BatchPODWithPagedKVCacheWrapper(workspace)
    tables = [
        (indptr(n).cuda(), *(t.cuda() for t in pages.table))
        for n, pages in (([0], of_prefill), ([1, 1], of_decode))
    ]
    wrapper.plan(*tables[0], *tables[1], *SIZES, **TYPES)
    check(inputs, lambda pdl: wrapper.run(q_p, cache, q_d, cache, causal_p=True, enable_pdl=pdl))
    assert runs.WITH_PREVIOUS not in launches
