# SPDX-License-Identifier: Apache-2.0
"""Decodes without a planning kernel on a GPU: the bits of those with one, counters, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_gpu_functional import BF16, E4M3, I32, PAGE, WIDTH, XQA, Batch

from precast._ops.attention.functional import launch, self_plan

CAPACITY = WIDTH * PAGE
SIZE = 256 << 20


@pytest.fixture
def workspace() -> torch.Tensor:
    """May hold anything."""
    return torch.full((SIZE,), 0xFF, dtype=torch.uint8, device="cuda")


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The result of a call that finds its own work, and that of one with a plan."""

    def run(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = XQA(**given)
        assert all_counters(), "the call has a plan"
        with monkeypatch.context() as patched:
            patched.setattr(launch, "_blocks", {})
            patched.setattr(launch, "counters_of", lambda call, shape: None)
            return own, XQA(**given)

    return run


def all_counters() -> list[torch.Tensor]:
    torch.cuda.synchronize()
    return [*self_plan._counters.values()]


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("count", [1, 2, 5, 31, 32, 33, 64, 127, 200, 255, 256])
def test_the_bits_are_those_of_a_plan(
    count: int,
    kv_dtype: torch.dtype,
    both: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    workspace: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Equal lengths, ragged ones, none at all, one long request, and lengths of garbage."""
    pick = torch.Generator().manual_seed(count)
    ragged = torch.randint(CAPACITY, (count,), generator=pick).tolist()
    garbage = [(-(2**31), CAPACITY + 1, 2**31 - 1, -1, 0, 3)[i % 6] for i in range(count)]
    many = [[n] * count for n in (0, 1, 64, 512, 1000)]
    batches = [*many, ragged, [1] * (count - 1) + [CAPACITY], garbage]
    for group, q_len in ((1, 1), (4, 1), (4, 4), (3, 5), (16, 1)):
        batch = Batch(ragged, generator, q_len, group, kv_dtype=kv_dtype)
        for lens in batches:
            batch.fill(lens, generator)
            for window in (-1, 100):
                own, planned = both(**batch.arguments(workspace, window_left=window))
                assert torch.equal(own, planned), (group, q_len, lens, window)
    batch.fill(ragged, generator)
    batch.close(XQA(**batch.arguments(workspace)))
    assert not any(counters.any() for counters in all_counters()), "a counter was left"


@pytest.mark.parametrize("dim", [64, 256])
def test_other_head_dimensions(
    dim: int,
    both: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    workspace: torch.Tensor,
    generator: torch.Generator,
) -> None:
    cache = torch.randn(500, 2, 2, PAGE, dim, device="cuda", generator=generator).to(BF16)
    for count in (1, 77):
        q = torch.randn(count, 8, dim, device="cuda", generator=generator).to(BF16)
        lens = torch.randint(CAPACITY, (count,), device="cuda", generator=generator).to(I32)
        table = torch.randint(500, (count, WIDTH), device="cuda", generator=generator).to(I32)
        given = {"bmm1_scale": dim**-0.5, "kv_layout": "HND"}
        own, planned = both(
            query=q,
            kv_cache=cache,
            workspace_buffer=workspace,
            block_tables=table,
            seq_lens=lens,
            max_seq_len=CAPACITY,
            **given,
        )
        assert torch.equal(own, planned)


def test_pages_behind_the_end_are_not_read(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    lens = [0, 1, 16, 17, 500, 4000]
    batch = Batch(lens, generator)
    clean = XQA(**batch.arguments(workspace))
    for row, length in zip(batch.table, lens):
        row[-(-length // PAGE) :] = 2**31 - 1
    assert torch.equal(XQA(**batch.arguments(workspace)), clean)
    batch.close(clean)


def test_a_workspace_may_change_between_calls(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    """Calls with a plan and without one, and writes of others, take turns in one workspace."""
    short, drafts = Batch([900, 3, 4000], generator), Batch([900, 300], generator, q_len=9)
    want = XQA(**short.arguments(workspace)).clone()
    for value in (0, 0xFF, 0x5A):
        workspace.fill_(value)
        assert torch.equal(XQA(**short.arguments(workspace)), want)
        drafts.close(XQA(**drafts.arguments(workspace)))
        assert torch.equal(XQA(**short.arguments(workspace)), want)


@pytest.mark.parametrize("is_warm", [False, True])
def test_graphs(is_warm: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is captured first has a plan; either reads the lengths of its replay."""
    monkeypatch.setattr(launch, "_blocks", {})
    monkeypatch.setattr(self_plan, "_counters", {})
    workspace = torch.full((SIZE,), 0xFF, dtype=torch.uint8, device="cuda")
    batch = Batch([1, 1, 1], generator)
    out = torch.empty_like(batch.q)
    given = batch.arguments(workspace, out=out)
    other = workspace if is_warm else torch.zeros_like(workspace)
    XQA(**Batch([5, 5], generator).arguments(other))  # Loads the modules.
    assert len(self_plan._counters) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            XQA(**given)
    assert len(self_plan._counters) == 1
    for lens in ([1, 1, 1], [CAPACITY, 5, 0], [0, 0, 0], [64, 4000, 17]):
        batch.fill(lens, generator)
        out.fill_(torch.nan)
        graph.replay()
        batch.close(out)
        assert torch.equal(XQA(**batch.arguments(workspace)), out)


def test_workspaces_at_once(generator: torch.Generator) -> None:
    """Each has counters of its own, so two streams do not disturb each other."""
    batches = [Batch([4000] * (i + 1), generator) for i in range(2)]
    workspaces = [torch.empty(SIZE, dtype=torch.uint8, device="cuda") for _ in batches]
    wants = [XQA(**b.arguments(w)).clone() for b, w in zip(batches, workspaces)]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(50):
        outs = []
        for batch, memory, stream in zip(batches, workspaces, streams):
            with torch.cuda.stream(stream):
                outs.append(XQA(**batch.arguments(memory)))
        torch.cuda.synchronize()
        for out, want in zip(outs, wants):
            assert torch.equal(out, want)
