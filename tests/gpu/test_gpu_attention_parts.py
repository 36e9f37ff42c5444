# SPDX-License-Identifier: Apache-2.0
"""Test attention on a GPU where tiles are split, and their CTAs combine the splits together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_layout import shape_word, size_of
from test_gpu_attention import BF16, DIM, HEADS, I32, PLAN, SHAPE, WORKSPACE, Batch, close

import precast
from precast._ops.attention import heuristics as tiles

#: Queries and tokens of each request.
CASES = (
    ([32], [8192]),
    ([16], [9000]),
    ([32], [1]),
    ([33, 32], [5000, 1700]),
    ([1, 20, 3], [900, 6000, 0]),
    ([100], [4096]),
)


class Rows(Batch):
    """Requests with several queries each."""

    def __init__(self, q_lens: list[int], lens: list[int], generator: torch.Generator) -> None:
        super().__init__(lens, generator)
        self.rows = torch.tensor([0, *q_lens]).cumsum(0).to(I32)
        shape = sum(q_lens), HEADS, DIM
        self.q = torch.randn(shape, device="cuda", generator=generator).to(BF16)

    def planned(self, workspace: torch.Tensor, causal: bool = False, backend: str = "auto") -> Any:
        wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
        self.plan(wrapper, causal)
        return wrapper

    def plan(self, wrapper: Any, causal: bool = False) -> None:
        host = [table.cpu() for table in self.table]
        wrapper.plan(self.rows, *host, *SHAPE, causal=causal, **PLAN)


@pytest.fixture
def workspace() -> torch.Tensor:
    """The workspace may hold anything."""
    return torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8, device="cuda")


def plan_of(wrapper: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan, and its split counters: none where no tile is split."""
    plan = wrapper._int_workspace_buffer.view(I32)
    header, ctas = size_of("PlanHeader"), int(plan[shape_word("ctas")])
    return plan, plan[header : header + (0 if plan[0] else ctas)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_m", [*tiles.BLOCK_MS[1:], 0])  # 0: what is chosen
@pytest.mark.parametrize("q_lens, lens", CASES)
def test_splits_are_combined(
    workspace: torch.Tensor,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    q_lens: list[int],
    lens: list[int],
    block_m: int,
    causal: bool,
) -> None:
    monkeypatch.setattr(tiles, "choose", lambda *_: block_m)
    batch = Rows(q_lens, lens, generator)
    wrapper = batch.planned(workspace, causal, "fa2" if block_m else "auto")
    assert not block_m or wrapper._plan_info[0] == block_m
    plan, counters = plan_of(wrapper)
    assert not counters.any()
    before = plan.clone()
    want = wrapper.reference(
        batch.q.float(), batch.cache, batch.rows.cuda(), *batch.table, causal=causal
    )
    for _ in range(3):
        workspace.fill_(0xFF)
        out, lse = wrapper.run_return_lse(batch.q, batch.cache)
        close(out, want[0])
        torch.testing.assert_close(lse, want[1], rtol=1e-3, atol=2e-3)
        assert torch.equal(plan, before)


def test_the_same_bits_beside_other_kernels(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    """Other kernels keep some CTAs of a tile off the device: no CTA may wait for them for ever."""
    batch = Rows([32], [8192], generator)
    wrapper = batch.planned(workspace)
    plan, counters = plan_of(wrapper)
    assert plan[0] == 0, "no tile is split"
    out, lse = wrapper.run_return_lse(batch.q, batch.cache)
    side = torch.cuda.Stream()
    factors = torch.randn(2, 1024, 4096, device="cuda", generator=generator).to(BF16)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for i in range(200):
        if i % 2 == 0:
            with torch.cuda.stream(side):
                factors[0] @ factors[1].T
        again = wrapper.run_return_lse(batch.q, batch.cache)
        differ += (again[0] != out).sum() + (again[1] != lse).sum()
    torch.cuda.synchronize()
    assert differ == 0
    assert not counters.any()


def test_counters_are_ready_for_the_next_run(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    """A graph is replayed, with plans between its replays."""
    batches = [Rows([32], [n], generator) for n in (8192, 64, 5000, 0, 9000)]
    first = batches[0]
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        use_cuda_graph=True,
        qo_indptr_buf=torch.zeros(2, dtype=I32, device="cuda"),
        paged_kv_indptr_buf=torch.zeros(2, dtype=I32, device="cuda"),
        paged_kv_indices_buf=torch.zeros(600, dtype=I32, device="cuda"),
        paged_kv_last_page_len_buf=torch.zeros(1, dtype=I32, device="cuda"),
    )
    first.plan(wrapper)
    out = torch.empty_like(first.q)
    wrapper.run(first.q, first.cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            wrapper.run(first.q, first.cache, out=out)
    for batch in (*batches, *reversed(batches)):
        batch.plan(wrapper)
        want = wrapper.reference(
            first.q.float(), first.cache, first.rows.cuda(), *batch.table, causal=False
        )
        for _ in range(4):
            out.fill_(torch.nan)
            graph.replay()
            close(out, want[0])
        assert not plan_of(wrapper)[1].any()
