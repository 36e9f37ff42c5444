# SPDX-License-Identifier: Apache-2.0
"""What precast.testing measures on a real GPU: three ways to time a call, and the ceilings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

import precast
from precast.testing import (
    Timing,
    bench_cpu_time,
    bench_gpu_time,
    bench_gpu_time_with_cuda_event,
    bench_gpu_time_with_cudagraph,
    bench_gpu_time_with_cupti,
    bench_side_by_side,
    measure_ceilings,
    measure_matmul_ceiling,
    timing,
)

pytestmark = pytest.mark.alone

DTYPE = torch.bfloat16


@pytest.fixture
def cupti(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """CUPTI has to be used, not its replacement."""
    if importlib.util.find_spec("cupti") is None:
        pytest.skip('cupti-python is not installed; pip install "precast[bench]"')
    timing._say_no_cupti.cache_clear()
    caplog.set_level("INFO", logger="precast")
    yield
    assert "CUPTI cannot be used" not in caplog.text


def tensors(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn((rows, columns), dtype=DTYPE, device="cuda")
    return x, torch.empty_like(x)


def scale(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return precast.scale(x, 1.25, out)


def seconds(samples: list[float]) -> float:
    return Timing.of_milliseconds(samples).median


def test_events_and_graphs_agree_on_a_long_kernel(free_memory: None) -> None:
    args = tensors(16384, 8192)
    events = seconds(bench_gpu_time_with_cuda_event(scale, input_args=args))
    graph = seconds(bench_gpu_time_with_cudagraph(scale, input_args=args))
    side = seconds(bench_side_by_side({"a": scale, "b": scale}, args)["b"])
    assert events == pytest.approx(graph, rel=0.1)
    assert side == pytest.approx(graph, rel=0.05)


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_cupti_agrees_with_graphs_on_a_long_kernel(
    use_cuda_graph: bool, cupti: None, free_memory: None
) -> None:
    args = tensors(16384, 8192)
    graph = seconds(bench_gpu_time_with_cudagraph(scale, input_args=args))
    kernel = seconds(
        bench_gpu_time_with_cupti(scale, input_args=args, use_cuda_graph=use_cuda_graph)
    )
    print(f"graph {graph * 1e6:.2f} us, CUPTI {kernel * 1e6:.2f} us")
    assert kernel == pytest.approx(graph, rel=0.1)


def test_cupti_leaves_the_launch_of_a_short_kernel_out(cupti: None) -> None:
    args = tensors(1, 4096)
    events = seconds(bench_gpu_time_with_cuda_event(scale, input_args=args))
    kernel = seconds(bench_gpu_time_with_cupti(scale, input_args=args))
    print(f"events {events * 1e6:.2f} us, CUPTI {kernel * 1e6:.2f} us")
    assert 0 < kernel < events


def test_cupti_counts_every_kernel_of_a_call_and_no_gap(cupti: None, free_memory: None) -> None:
    """A copy, a memset and a kernel, with the CPU idle in between."""
    x, out = tensors(8192, 8192)

    def call(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)
        torch.cuda.synchronize()
        scale(x, out)
        torch.cuda.synchronize()
        out.zero_()

    parts = [
        seconds(bench_gpu_time_with_cupti(part, input_args=(x, out)))
        for part in (lambda x, out: out.copy_(x), scale, lambda x, out: out.zero_())
    ]
    whole = seconds(bench_gpu_time_with_cupti(call, input_args=(x, out)))
    print(f"parts {[f'{p * 1e6:.2f}' for p in parts]} us, together {whole * 1e6:.2f} us")
    assert whole == pytest.approx(sum(parts), rel=0.15)


def test_cupti_sees_launches_through_the_driver_api(cupti: None, free_memory: None) -> None:
    """cuBLAS launches past the runtime."""
    a, b = (torch.randn((4096, 4096), dtype=DTYPE, device="cuda") for _ in range(2))
    graph = seconds(bench_gpu_time_with_cudagraph(torch.mm, input_args=(a, b)))
    kernel = seconds(bench_gpu_time_with_cupti(torch.mm, input_args=(a, b)))
    assert kernel == pytest.approx(graph, rel=0.15)


def test_cupti_can_be_used_again_and_slows_nothing_down_afterwards(cupti: None) -> None:
    args = tensors(64, 1024)
    before = bench_cpu_time(scale, args).median
    times = [seconds(bench_gpu_time(scale, input_args=args, enable_cupti=True)) for _ in range(5)]
    after = bench_cpu_time(scale, args).median
    print(f"CPU {before * 1e6:.2f} us before, {after * 1e6:.2f} us after; {times}")
    assert max(times) < 1.5 * min(times)
    assert after < 1.3 * before


def test_an_error_of_the_call_leaves_no_profiler_behind(cupti: None) -> None:
    args = tensors(64, 1024)
    calls = 0

    def fails(x: torch.Tensor, out: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OverflowError("of the call itself")
        scale(x, out)

    with pytest.raises(OverflowError, match="of the call itself"):
        bench_gpu_time_with_cupti(fails, 3, input_args=args)
    assert seconds(bench_gpu_time_with_cupti(scale, input_args=args)) > 0


def test_ceilings_are_plausible(free_memory: None) -> None:
    ceilings = measure_ceilings()
    matmul = measure_matmul_ceiling(DTYPE)
    print(*ceilings, matmul, sep="\n")
    assert 100 < ceilings.elementwise.best < 20_000
    assert 0.5 < ceilings.read.best / ceilings.elementwise.best < 2
    assert 0.3 < ceilings.launch.best < 20
    assert (matmul.unit, len(matmul.all)) == ("TFLOP/s", 4)
    assert 10 < matmul.best < 20_000
