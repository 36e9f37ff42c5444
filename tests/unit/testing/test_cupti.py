# SPDX-License-Identifier: Apache-2.0
"""Kernel times from CUPTI, with a stand-in for the package and a device that only keeps time."""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice

from precast.testing import bench_gpu_time, bench_gpu_time_with_cupti, timing
from precast.testing.cupti import CuptiError, Session, Span, busy_nanoseconds, call_milliseconds

# -- records to times -----------------------------------------------------------------------------


def test_gaps_do_not_count_and_overlaps_count_once() -> None:
    spans = [Span(1, 100, 200), Span(2, 500, 600), Span(3, 550, 700), Span(4, 560, 570)]
    assert busy_nanoseconds(reversed(spans)) == 100 + 200
    assert busy_nanoseconds([]) == 0


def test_activities_belong_to_the_call_that_launched_them() -> None:
    spans = [Span(7, 5_000_000, 8_000_000), Span(3, 1, 1_000_001), Span(9, 20, 4_000_000_020)]
    # Correlation 9 is of no call: something else ran on the GPU.
    assert call_milliseconds(spans, {3: 0, 7: 1}, 2) == pytest.approx([1.0, 3.0])


def test_several_kernels_of_one_call_are_one_time() -> None:
    spans = [Span(1, 10, 1_000_010), Span(2, 9_000_000, 11_000_000)]
    assert call_milliseconds(spans, {1: 0, 2: 0}, 1) == pytest.approx([3.0])


def test_calls_with_lost_records_are_left_out() -> None:
    def pair(call: int, milliseconds: int) -> list[Span]:
        start = 1 + call * 10_000_000
        return [
            Span(2 * call, start, start + milliseconds * 500_000),
            Span(2 * call + 1, start + 5_000_000, start + 5_000_000 + milliseconds * 500_000),
        ]

    calls = {correlation: correlation // 2 for correlation in range(6)}
    spans = [*pair(0, 1), pair(1, 2)[0], *pair(2, 3)]
    assert call_milliseconds(spans, calls, 3) == pytest.approx([1.0, 3.0])
    untimed = [*pair(0, 1), Span(2, 0, 0), *pair(2, 3)]
    assert call_milliseconds(untimed, calls, 3) == pytest.approx([1.0, 3.0])


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "work for 0 of 4 calls"),
        ([Span(0, 1, 2)], "work for 1 of 4 calls, and the same amount for 1"),
    ],
)
def test_too_few_records_are_an_error(spans: list[Span], message: str) -> None:
    with pytest.raises(CuptiError, match=message):
        call_milliseconds(spans, {n: n for n in range(4)}, 4)


# -- a stand-in for cupti-python ------------------------------------------------------------------


class FakeCupti(ModuleType):
    """``cupti.cupti``: keeps records of what a FakeDevice launches while it is enabled."""

    # The numbers of CUPTI's cupti_activity.h.
    ActivityKind = enum.IntEnum(
        "ActivityKind",
        {
            "MEMCPY": 1,
            "MEMSET": 2,
            "DRIVER": 4,
            "RUNTIME": 5,
            "CONCURRENT_KERNEL": 10,
            "MEMCPY2": 22,
            "EXTERNAL_CORRELATION": 39,
        },
    )
    ExternalCorrelationKind = enum.IntEnum("ExternalCorrelationKind", {"CUSTOM0": 3})

    def __init__(self) -> None:
        super().__init__("cupti.cupti")
        self.enabled: set[int] = set()
        self.ids: list[int] = []
        self.pending: list[Any] = []
        self.finalized = 0
        self.correlation = 0
        self.reject: Exception | None = None
        self.lose = False

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        if self.reject is not None:
            raise self.reject
        size, records = requested()
        assert size > 0
        assert records == 0
        self.completed = completed

    def activity_enable(self, kind: int) -> None:
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(kind)

    def activity_push_external_correlation_id(self, kind: int, external: int) -> None:
        assert external > 0
        self.ids.append(external)

    def activity_pop_external_correlation_id(self, kind: int) -> int:
        return self.ids.pop()

    def activity_flush_all(self, flag: int) -> None:
        assert flag == 1
        records, self.pending = self.pending, []
        self.completed(records)
        for record in records:  # as if CUPTI used the buffer again
            vars(record).clear()

    def finalize(self) -> None:
        assert not self.enabled
        self.finalized += 1

    def launched(self, start: float, end: float) -> None:
        """A kernel, from ``start`` to ``end`` in milliseconds."""
        kinds = self.ActivityKind
        if not {kinds.CONCURRENT_KERNEL, kinds.RUNTIME} <= self.enabled:
            return
        self.correlation += 1
        same = {"correlation_id": self.correlation}
        if self.ids and kinds.EXTERNAL_CORRELATION in self.enabled:
            record = {"kind": 39, "external_kind": 3, "external_id": self.ids[-1], **same}
            self.pending.append(SimpleNamespace(**record))
        self.pending.append(SimpleNamespace(kind=5, start=1, end=2, **same))
        if not self.lose:
            nanoseconds = {"start": int(start * 1e6) + 1, "end": int(end * 1e6) + 1}
            self.pending.append(SimpleNamespace(kind=10, **nanoseconds, **same))


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    fake, package = FakeCupti(), ModuleType("cupti")
    package.cupti = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.cupti", fake)
    timing._say_no_cupti.cache_clear()
    return fake


def kernels(device: FakeDevice, cupti: FakeCupti, gap: float, *milliseconds: float) -> Callable:
    """A call of several kernels, each with a gap before it in which only the CPU works."""

    def call(tensor: torch.Tensor) -> None:
        for duration in milliseconds:
            if device.captured is not None:
                device.captured.append(duration)
                continue
            device.now += gap
            cupti.launched(device.now, device.now + duration)
            device.now += duration

    return call


def test_launch_gaps_are_not_in_the_time(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    call = kernels(device, cupti, 5.0, 0.25, 0.5)
    options = {"repeat_iters": 6, "input_args": (torch.ones(25),)}
    assert bench_gpu_time_with_cupti(call, **options) == pytest.approx([0.75] * 6)
    assert bench_gpu_time(call, enable_cupti=True, **options) == pytest.approx([0.75] * 6)
    assert bench_gpu_time(call, **options) == pytest.approx([10.75] * 6)


def test_a_graph_is_divided_by_its_calls(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    replay = torch.cuda.CUDAGraph.replay

    def recorded(graph: Any) -> None:
        cupti.launched(device.now, device.now + sum(graph.work))
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", recorded)
    call = kernels(device, cupti, 5.0, 0.25)
    samples = bench_gpu_time_with_cupti(
        call, repeat_iters=3, use_cuda_graph=True, input_args=(torch.ones(25),)
    )
    assert samples == pytest.approx([0.25] * 3)


def test_cupti_is_detached_afterwards_also_after_an_error(
    cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(monkeypatch)
    options = {"dry_run_iters": 3, "input_args": (torch.ones(25),)}
    bench_gpu_time_with_cupti(kernels(device, cupti, 0.0, 1.0), **options)
    assert cupti.finalized == 1
    assert not cupti.enabled
    calls = 0

    def fails(tensor: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OverflowError("of the call itself")

    with pytest.raises(OverflowError, match="of the call itself"):
        bench_gpu_time_with_cupti(fails, **options)
    assert cupti.finalized == 2
    assert not cupti.enabled
    assert not cupti.ids


def test_without_cupti_events_are_used_and_logged_once(
    cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "cupti", None)  # importing it raises ImportError
    device = FakeDevice(monkeypatch)
    for graph in (False, True, False):
        samples = bench_gpu_time(device.kernel(0.25), 3, 5, enable_cupti=True, use_cuda_graph=graph)
        assert samples == pytest.approx([0.25] * 5)
    lines = [r.getMessage() for r in caplog.records if "CUPTI" in r.getMessage()]
    assert len(lines) == 1
    assert "times are taken with CUDA events (ModuleNotFoundError" in lines[0]
    assert 'pip install "precast[bench]"' in lines[0]


def test_another_profiler_at_work_is_a_reason_too(
    cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cupti.reject = RuntimeError("ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
    device = FakeDevice(monkeypatch)
    samples = bench_gpu_time_with_cupti(device.kernel(2.0), repeat_iters=4)
    assert samples == pytest.approx([2.0] * 4)
    assert "MULTIPLE_SUBSCRIBERS" in caplog.text


def test_lost_records_fall_back_to_events(
    cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cupti.lose = True
    device = FakeDevice(monkeypatch)
    call = kernels(device, cupti, 1.0, 0.5)
    samples = bench_gpu_time_with_cupti(call, repeat_iters=4, input_args=(torch.ones(25),))
    assert samples == pytest.approx([1.5] * 4)
    assert "GPU work for 0 of 4 calls" in caplog.text


def test_what_is_used_of_cupti_python_exists() -> None:
    """Against the package itself, which imports without a GPU."""
    real = pytest.importorskip("cupti.cupti", reason="cupti-python is not installed")
    for name in dir(FakeCupti):
        if name.startswith("activity_") or name == "finalize":
            assert callable(getattr(real, name)), name
    for kind in FakeCupti.ActivityKind:
        assert int(getattr(real.ActivityKind, kind.name)) == kind
    assert int(real.ExternalCorrelationKind.CUSTOM0) == 3
    for field in ("correlation_id", "external_id", "kind"):
        assert hasattr(real.ActivityExternalCorrelation, field)
    if not torch.cuda.is_available():
        with pytest.raises(CuptiError, match=r"CUDA driver is not found|Error"), Session():
            pass
