# SPDX-License-Identifier: Apache-2.0
"""Time one function on the GPU, with the arguments of FlashInfer's functions of these names.

All take the same options, which :func:`bench_gpu_time` explains. L2 is cold only for tensors that
are passed as ``input_args`` or ``input_kwargs``: each call gets copies of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from precast.testing import timing
from precast.testing.rotation import rotation_for
from precast.testing.timing import Options

_Measure = Callable[[Callable[..., Any], Sequence[Any], Options], list[float]]


def bench_gpu_time(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: str | None = None,
    sleep_after_run: bool = False,
    enable_cupti: bool = False,
    use_cuda_graph: bool = False,
    num_iters_within_graph: int = 10,
    input_args: Sequence[Any] = (),
    input_kwargs: Mapping[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[Iterable[float]], float] = max,
) -> list[float]:
    """Measure the milliseconds of GPU time of ``fn(*input_args, **input_kwargs)``.

    Parameters
    ----------
    fn : callable
        Launches work on the current stream. It may write its arguments in place.
    dry_run_iters : int, optional
        Calls before the measurement. Default: three, and as many as take ``dry_run_time_ms``.
    repeat_iters : int, optional
        Samples (calls, or replays of a graph). Default: as many as take ``repeat_time_ms``, 10 to
        1000.
    dry_run_time_ms, repeat_time_ms : float
        Milliseconds of GPU time. Without effect where a number of calls is given.
    l2_flush : bool, optional
        FlashInfer's older name of ``cold_l2_cache``, which it replaces where it is given.
    l2_flush_size_mb, l2_flush_device : optional
        Only None: the size of L2 is that of the current device.
    sleep_after_run : bool
        Sleep between samples, five times as long as a sample took and at most a second, so that
        the chip stays cool.
    enable_cupti : bool
        Take kernel times without gaps from CUPTI, ``pip install "precast[bench]"``, as
        :func:`bench_gpu_time_with_cupti` does. Default: times between CUDA events.
    use_cuda_graph : bool
        Replay a CUDA graph of many calls, which excludes the launch by the CPU from the time.
    num_iters_within_graph : int
        The least number of calls in a graph. There are more if the graph takes less than 2 ms, and
        there is one for each copy of the arguments.
    input_args, input_kwargs
        The arguments of ``fn``; tensors among them are copied so that each call finds a cold L2.
    cold_l2_cache : bool
        Rotate the arguments through copies larger than L2.
    aggregate_op : callable
        With several ranks of ``torch.distributed``: what takes the times of a sample on all ranks
        and gives one. Every rank must call. Default: max.

    Returns
    -------
    list of float
        Milliseconds of one call, one for each sample. ``precast.testing.Timing.of_milliseconds``
        gives median and standard deviation in seconds.

    Raises
    ------
    ValueError
        ``l2_flush_size_mb`` or ``l2_flush_device`` is given.
    """
    options = locals()
    with_cupti, with_graph = options.pop("enable_cupti"), options.pop("use_cuda_graph")
    graph_calls = options.pop("num_iters_within_graph")
    if with_cupti:
        return bench_gpu_time_with_cupti(use_cuda_graph=with_graph, **options)
    if with_graph:
        return bench_gpu_time_with_cudagraph(num_iters_within_graph=graph_calls, **options)
    return bench_gpu_time_with_cuda_event(**options)


def bench_gpu_time_with_cuda_event(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: str | None = None,
    sleep_after_run: bool = False,
    input_args: Sequence[Any] = (),
    input_kwargs: Mapping[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[Iterable[float]], float] = max,
) -> list[float]:
    """Measure the milliseconds of each call between two CUDA events.

    Kernels shorter than their launch (some microseconds) need
    :func:`bench_gpu_time_with_cudagraph`. The arguments are those of :func:`bench_gpu_time`.
    """
    return _measured(timing.time_with_events, **locals())


def bench_gpu_time_with_cudagraph(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    num_iters_within_graph: int = 10,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: str | None = None,
    sleep_after_run: bool = False,
    input_args: Sequence[Any] = (),
    input_kwargs: Mapping[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[Iterable[float]], float] = max,
) -> list[float]:
    """Measure the milliseconds of one call; a sample is a replay of a graph of many calls.

    The arguments are those of :func:`bench_gpu_time`.
    """
    return _measured(timing.time_with_graph, **locals())


def bench_gpu_time_with_cupti(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: str | None = None,
    sleep_after_run: bool = False,
    use_cuda_graph: bool = False,
    input_args: Sequence[Any] = (),
    input_kwargs: Mapping[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[Iterable[float]], float] = max,
) -> list[float]:
    """Measure the milliseconds in which the GPU worked for each call, from CUPTI's records.

    Neither the launch nor gaps between the kernels of one call count. Every call waits for the one
    before; otherwise a kernel could start early, and its waiting would count as work. CUPTI slows
    launches down; it is detached before this returns. The arguments are those of
    :func:`bench_gpu_time`; with ``use_cuda_graph`` a sample is the mean of one replay.

    Returns
    -------
    list of float
        One sample a call or replay. If CUPTI cannot be used, the result of
        :func:`bench_gpu_time_with_cuda_event` (or ``_with_cudagraph``); one line in the log gives
        the reason.
    """
    options = locals()
    graph = options.pop("use_cuda_graph")
    return _measured(functools.partial(timing.time_with_cupti, use_cuda_graph=graph), **options)


def _measured(
    measure: _Measure,
    fn: Callable[..., Any],
    dry_run_iters: int | None,
    repeat_iters: int | None,
    dry_run_time_ms: float,
    repeat_time_ms: float,
    l2_flush: bool | None,
    l2_flush_size_mb: int | None,
    l2_flush_device: str | None,
    sleep_after_run: bool,
    input_args: Sequence[Any],
    input_kwargs: Mapping[str, Any] | None,
    cold_l2_cache: bool,
    aggregate_op: Callable[[Iterable[float]], float],
    num_iters_within_graph: int = 1,
) -> list[float]:
    """Warm up and measure; the arguments are those of the functions above."""
    for name, value in (("size_mb", l2_flush_size_mb), ("device", l2_flush_device)):
        if value is not None:
            raise ValueError(
                f"bench_gpu_time: l2_flush_{name} must be None, got {value!r}. Fix: pass the "
                f"arguments of fn as input_args; their copies exceed the L2 of the current device"
            )
    options = Options(
        dry_run_iters,
        repeat_iters,
        dry_run_time_ms * 1e-3,
        repeat_time_ms * 1e-3,
        sleep_after_run,
        num_iters_within_graph,
        lambda seconds: _on_all_ranks([seconds], aggregate_op)[0],
    )
    calls = rotation_for(input_args, input_kwargs, cold_l2_cache if l2_flush is None else l2_flush)
    timing.warm_up(fn, calls, options)
    return _on_all_ranks(measure(fn, calls, options), aggregate_op)


def _on_all_ranks(
    values: list[float], operation: Callable[[Iterable[float]], float]
) -> list[float]:
    """One value for those of all ranks at each place; the values themselves on one rank."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return values
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, values)
    return [operation(row) for row in zip(*ranks)]
