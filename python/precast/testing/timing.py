# SPDX-License-Identifier: Apache-2.0
"""Measure the GPU time of calls: CUPTI, CUDA events, graph replay, several calls side by side.

All inputs are rotated through copies larger than L2 (``precast.testing.rotation``) unless
``cold_l2_cache=False``. A function is warmed up before anything is measured, so module load,
compilation and handle creation stay out of the numbers.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from precast._base.log import get_logger
from precast.testing import cupti
from precast.testing.rotation import Call, rotation_for
from precast.testing.stats import Timing

# GPU time of one replay, which is long compared with the few microseconds of a graph's start.
_GRAPH_SECONDS = 2e-3
# GPU time of a whole measurement if the caller does not choose the repetitions.
_TOTAL_SECONDS = 0.1
_WARM_UP = 3


def bench_gpu_time(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    enable_cupti: bool = True,
    use_cuda_graph: bool = False,
    cold_l2_cache: bool = True,
) -> tuple[float, float]:
    """Median and standard deviation of the GPU time of ``fn(*args, **kwargs)``, in seconds.

    By default this is the time of its kernels, copies and memsets from CUPTI's records, without
    gaps. Without ``cupti-python`` it is the time between CUDA events, with one line in the log.

    Parameters
    ----------
    fn : callable
        Launches work on the current stream. It may write its arguments in place.
    args, kwargs
        Its arguments; tensors among them are copied so that each call finds a cold L2.
    dry_run_iters : int, optional
        Calls before the measurement; default 3.
    repeat_iters : int, optional
        Samples (calls, or replays of a graph); default: as many as fit into 0.1 s, 10 to 1000.
    enable_cupti : bool
        Take kernel times from CUPTI, ``pip install "precast[bench]"``.
    use_cuda_graph : bool
        Replay a CUDA graph of many calls, which excludes the launch by the CPU from the time.
    cold_l2_cache : bool
        Rotate the arguments through copies larger than L2.

    Returns
    -------
    tuple of float
        ``(median, std)`` in seconds for one call.
    """
    measure: Callable[..., list[float]]
    if enable_cupti:
        measure = functools.partial(bench_gpu_time_with_cupti, use_cuda_graph=use_cuda_graph)
    else:
        measure = (
            bench_gpu_time_with_cudagraph if use_cuda_graph else bench_gpu_time_with_cuda_event
        )
    timing = Timing.of_milliseconds(
        measure(
            fn,
            args,
            kwargs,
            dry_run_iters=dry_run_iters,
            repeat_iters=repeat_iters,
            cold_l2_cache=cold_l2_cache,
        )
    )
    return timing.median, timing.std


def bench_gpu_time_with_cupti(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    use_cuda_graph: bool = False,
    cold_l2_cache: bool = True,
) -> list[float]:
    """Measure the milliseconds in which the GPU worked for each call, from CUPTI's records.

    Neither the launch nor gaps between the kernels of one call count. Every call waits for the one
    before; otherwise a kernel could start early, and its waiting would count as work. CUPTI slows
    launches down; it is detached before this returns.

    Parameters
    ----------
    use_cuda_graph : bool
        Replay graphs with a call for each copy; a sample is the mean of one replay.

    Returns
    -------
    list of float
        One sample a call or replay. If CUPTI cannot be used, the result of
        :func:`bench_gpu_time_with_cuda_event` (or ``_with_cudagraph``); one line in the log gives
        the reason.
    """
    calls = rotation_for(args, kwargs, cold_l2_cache)
    _warm_up(fn, calls, dry_run_iters)
    try:
        return _with_cupti(fn, calls, repeat_iters, use_cuda_graph)
    except cupti.CuptiError as error:
        _say_no_cupti(str(error))
    return (_with_graph if use_cuda_graph else _with_events)(fn, calls, repeat_iters)


@functools.cache  # One warning a process and reason.
def _say_no_cupti(reason: str) -> None:
    get_logger().info(
        "CUPTI cannot be used, so times are taken with CUDA events (%s)."
        ' Fix: pip install "precast[bench]"',
        reason,
    )


def bench_gpu_time_with_cuda_event(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    cold_l2_cache: bool = True,
) -> list[float]:
    """Measure the milliseconds of each call between two CUDA events.

    Kernels shorter than their launch (some microseconds) need ``bench_gpu_time_with_cudagraph``.
    """
    calls = rotation_for(args, kwargs, cold_l2_cache)
    _warm_up(fn, calls, dry_run_iters)
    return _with_events(fn, calls, repeat_iters)


def bench_gpu_time_with_cudagraph(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    cold_l2_cache: bool = True,
) -> list[float]:
    """Measure the milliseconds of one call; a sample is a replay of one call for each copy."""
    calls = rotation_for(args, kwargs, cold_l2_cache)
    _warm_up(fn, calls, dry_run_iters)
    return _with_graph(fn, calls, repeat_iters)


def bench_side_by_side(
    functions: Mapping[str, Callable[..., Any]],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rounds: int | None = None,
    cold_l2_cache: bool = True,
) -> dict[str, list[float]]:
    """Measure the milliseconds of one call of each function, in turn on the same copies.

    Clocks and temperature drift during a run. If replays alternate, the drift affects every
    function equally, so a ratio of two medians is a property of the functions. Each round has a
    random order, because a function that always ran after the one that heats the chip most would
    always get the lowest clock.

    Parameters
    ----------
    functions : mapping of str to callable
        Each is called with the same arguments and captured in its own graph.
    rounds : int, optional
        Replays of each graph; default: as many as the slowest needs for 0.1 s, 10 to 1000.

    Returns
    -------
    dict
        Name to the list of milliseconds.
    """
    calls = rotation_for(args, kwargs, cold_l2_cache)
    graphs = {}
    for name, fn in functions.items():
        _warm_up(fn, calls, None)
        graphs[name] = capture(fn, calls)
    return replay(graphs, rounds or _repeats(max(graph.seconds for graph in graphs.values())))


class Graph(NamedTuple):
    """A captured sequence of calls."""

    graph: torch.cuda.CUDAGraph
    calls: int
    seconds: float  # Approximate GPU time of one replay.
    outputs: list[Any]  # Results of the calls, whose memory belongs to the graph.

    def enqueue(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Launch one replay between two events, without waiting for it."""
        start, end = _event(), _event()
        start.record()
        self.graph.replay()
        end.record()
        return start, end


def replay(graphs: Mapping[str, Graph], rounds: int) -> dict[str, list[float]]:
    """Replay graphs in turn, each round in a random order, and return milliseconds by graph.

    All replays are queued before the CPU waits for the first, so that the GPU never waits for the
    CPU between an event and the graph that follows it. The first round fills the queue and is
    dropped.
    """
    orders, names = random.Random(0), list(graphs)
    rounds_of_names = [orders.sample(names, len(names)) for _ in range(rounds + 1)]
    queued = [(name, graphs[name].enqueue()) for order in rounds_of_names for name in order]
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for name, (start, end) in queued[len(graphs) :]:
        samples[name].append(float(start.elapsed_time(end)) / graphs[name].calls)
    return samples


def capture(fn: Callable[..., Any], calls: Sequence[Call], long: bool = True) -> Graph:
    """Capture one call for each copy; if ``long``, repeated until the graph takes 2 ms."""
    graph = _capture(fn, calls, 1)
    once = min(replay({"": graph}, 3)[""]) * 1e-3
    turns = graph_turns(once, len(calls)) if long else 1
    if turns > 1:
        graph = _capture(fn, calls, turns)
    return graph._replace(seconds=once * graph.calls)


def graph_turns(seconds_per_call: float, copies: int) -> int:
    """How often a graph must go through all copies to take at least 2 ms."""
    return max(1, math.ceil(_GRAPH_SECONDS / max(seconds_per_call * copies, 1e-9)))


def _capture(fn: Callable[..., Any], calls: Sequence[Call], turns: int) -> Graph:
    # As many results stay alive as there are copies, because a function that allocates its result
    # must not write the same, cached memory each time.
    outputs: deque[Any] = deque(maxlen=len(calls))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in calls:
                outputs.append(fn(*call.args, **call.kwargs))
    graph.replay()
    torch.cuda.synchronize()
    return Graph(graph, turns * len(calls), 0.0, list(outputs))


def _with_graph(
    fn: Callable[..., Any], calls: Sequence[Call], repeat_iters: int | None
) -> list[float]:
    graph = capture(fn, calls)
    return replay({"": graph}, repeat_iters or _repeats(graph.seconds))[""]


def _with_events(
    fn: Callable[..., Any], calls: Sequence[Call], repeat_iters: int | None
) -> list[float]:
    count = repeat_iters or _repeats(_once(fn, calls[0]))
    pairs = [(_event(), _event()) for _ in range(count)]
    for index, (before, after) in enumerate(pairs):
        call = calls[index % len(calls)]
        before.record()
        fn(*call.args, **call.kwargs)
        after.record()
    torch.cuda.synchronize()
    return [float(before.elapsed_time(after)) for before, after in pairs]


def _once(fn: Callable[..., Any], call: Call) -> float:
    """Seconds of one call between events, launch included."""
    start, end = _event(), _event()
    start.record()
    fn(*call.args, **call.kwargs)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _with_cupti(
    fn: Callable[..., Any], calls: Sequence[Call], repeat_iters: int | None, use_cuda_graph: bool
) -> list[float]:
    runs: list[Callable[[], Any]]
    with cupti.Session() as session:
        if use_cuda_graph:
            graph = capture(fn, calls, long=False)
            runs, per_run, seconds = [graph.graph.replay], graph.calls, graph.seconds
        else:
            runs = [functools.partial(fn, *call.args, **call.kwargs) for call in calls]
            per_run, seconds = 1, _once(fn, calls[0])
        count = repeat_iters or _repeats(seconds)
        torch.cuda.synchronize()
        for index in range(count):
            with session.call(index):
                runs[index % len(runs)]()
            torch.cuda.synchronize()
    samples = cupti.call_milliseconds(session.spans, session.calls, count)
    return [sample / per_run for sample in samples]


def _warm_up(fn: Callable[..., Any], calls: Sequence[Call], count: int | None) -> None:
    # torch requires a separate stream for work that is captured afterwards.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(_WARM_UP if count is None else count):
            call = calls[index % len(calls)]
            fn(*call.args, **call.kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _repeats(seconds: float) -> int:
    return min(1000, max(10, math.ceil(_TOTAL_SECONDS / max(seconds, 1e-9))))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
