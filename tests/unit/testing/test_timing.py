# SPDX-License-Identifier: Apache-2.0
"""How calls are timed, on a device that only keeps time."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice

from precast.testing import (
    bench_gpu_time,
    bench_gpu_time_with_cuda_event,
    bench_gpu_time_with_cudagraph,
    bench_side_by_side,
)
from precast.testing.timing import Graph, replay


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_time_is_that_of_one_call(use_cuda_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    seen: set[int] = set()
    median, std = bench_gpu_time(
        device.kernel(0.25, seen),
        (torch.ones(25),),
        enable_cupti=False,
        use_cuda_graph=use_cuda_graph,
    )
    assert median == pytest.approx(0.25e-3)
    assert std == pytest.approx(0.0, abs=1e-12)
    assert len(seen) == 20  # 100 bytes a call, twice a cache of 1000


def test_warm_cache_uses_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    seen: set[int] = set()
    bench_gpu_time(
        device.kernel(1.0, seen), (torch.ones(25),), enable_cupti=False, cold_l2_cache=False
    )
    assert len(seen) == 1


def test_repeats_are_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    args = (torch.ones(25),)
    for measure in (bench_gpu_time_with_cuda_event, bench_gpu_time_with_cudagraph):
        assert measure(device.kernel(2.0), args, repeat_iters=7) == pytest.approx([2.0] * 7)


def test_side_by_side_keeps_functions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    functions = {"slow": device.kernel(3.0), "fast": device.kernel(0.01)}
    samples = bench_side_by_side(functions, (torch.ones(25),), rounds=4)
    assert samples["slow"] == pytest.approx([3.0] * 4)
    assert samples["fast"] == pytest.approx([0.01] * 4)


def test_side_by_side_goes_round_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    names = ["hot", "warm", "cold"]
    begun: list[tuple[float, str]] = []
    enqueue = Graph.enqueue

    def watched(graph: Graph) -> object:
        begun.append((device.now, names[graph.calls - 1]))
        return enqueue(graph)

    monkeypatch.setattr(Graph, "enqueue", watched)
    graphs = {}
    for calls, name in enumerate(names, 1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            device.kernel(6.0)(torch.ones(1))
        graphs[name] = Graph(graph, calls, 0.0, [])
    samples = replay(graphs, 20)

    orders = [tuple(name for _, name in begun[i : i + 3]) for i in range(0, len(begun), 3)]
    assert [at for at, _ in begun] == [6.0 * i for i in range(63)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert {order[0] for order in orders} == set(names)
    assert len(set(orders)) == 6
    assert samples == {"hot": [6.0] * 20, "warm": [3.0] * 20, "cold": [2.0] * 20}
