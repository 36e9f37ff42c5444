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
    timing,
)
from precast.testing.timing import Graph, replay


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_time_is_that_of_one_call(use_cuda_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    seen: set[int] = set()
    samples = bench_gpu_time(
        device.kernel(0.25, seen), input_args=(torch.ones(25),), use_cuda_graph=use_cuda_graph
    )
    assert samples == pytest.approx([0.25] * len(samples))
    assert 10 <= len(samples) <= 1000
    assert len(seen) == 20  # 100 bytes a call, twice a cache of 1000


@pytest.mark.parametrize("option", ["cold_l2_cache", "l2_flush"])
def test_warm_cache_uses_one_buffer(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    seen: set[int] = set()
    bench_gpu_time(device.kernel(1.0, seen), input_args=(torch.ones(25),), **{option: False})
    assert len(seen) == 1


def test_the_size_of_a_flush_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    for option in ({"l2_flush_size_mb": 256}, {"l2_flush_device": "cuda"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} must be None.*input_args"):
            bench_gpu_time(device.kernel(1.0), **option)
    assert device.now == 0.0


def test_dry_runs_and_samples_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    samples = bench_gpu_time_with_cuda_event(
        device.kernel(2.0), dry_run_time_ms=30, repeat_time_ms=50
    )
    assert len(samples) == 25
    # Three calls, one to estimate, fifteen, one to estimate, and the samples.
    assert device.now == pytest.approx(2.0 * (3 + 1 + 15 + 1 + 25))
    device.now = 0.0
    samples = bench_gpu_time_with_cuda_event(device.kernel(2.0), 0, 4)
    assert device.now == pytest.approx(2.0 * (1 + 4))


def test_the_number_of_calls_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    captured: list[int] = []
    capture = timing._capture

    def counted(*args: object) -> Graph:
        captured.append(capture(*args).calls)
        return capture(*args)

    monkeypatch.setattr(timing, "_capture", counted)
    options = {"repeat_iters": 3, "cold_l2_cache": False}
    bench_gpu_time_with_cudagraph(device.kernel(4.0), num_iters_within_graph=17, **options)
    bench_gpu_time_with_cudagraph(device.kernel(0.1), num_iters_within_graph=7, **options)
    assert captured == [1, 17, 1, 20]  # The second takes 2 ms.


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_the_chip_cools_between_samples(
    use_cuda_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(monkeypatch)
    slept: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", slept.append)
    options = {"repeat_iters": 3, "use_cuda_graph": use_cuda_graph, "sleep_after_run": True}
    samples = bench_gpu_time(device.kernel(300.0), num_iters_within_graph=1, **options)
    assert samples == pytest.approx([300.0] * 3) and slept == [1.0] * 3
    slept.clear()
    bench_gpu_time(device.kernel(2.0), num_iters_within_graph=1, **options)
    assert slept == pytest.approx([0.01] * 3)


def test_ranks_repeat_equally_often_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank takes twice as long."""
    device = FakeDevice(monkeypatch)

    def gather(rows: list[object], values: list[float]) -> None:
        rows[:] = [values, [2 * value for value in values]]

    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    samples = bench_gpu_time_with_cuda_event(device.kernel(1.0), 3)
    assert samples == pytest.approx([2.0] * 50)
    assert bench_gpu_time_with_cuda_event(device.kernel(1.0), 3, 4, aggregate_op=min) == [1.0] * 4


def test_repeats_are_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    args = (torch.ones(25),)
    for measure in (bench_gpu_time_with_cuda_event, bench_gpu_time_with_cudagraph):
        samples = measure(device.kernel(2.0), repeat_iters=7, input_args=args)
        assert samples == pytest.approx([2.0] * 7)


def test_side_by_side_keeps_functions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    functions = {"slow": device.kernel(3.0), "fast": device.kernel(0.01)}
    samples = bench_side_by_side(functions, (torch.ones(25),), rounds=4)
    assert samples["slow"] == pytest.approx([3.0] * 4)
    assert samples["fast"] == pytest.approx([0.01] * 4)


def test_copies_are_counted_by_what_a_call_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    for touched, copies in ((None, 20), (10, 200)):  # twice a cache of 1000
        seen: set[int] = set()
        functions = {"some": device.kernel(1.0, seen)}
        bench_side_by_side(functions, (torch.ones(25),), rounds=2, bytes_per_call=touched)
        assert len(seen) == copies


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
