# SPDX-License-Identifier: Apache-2.0
"""Time calls: graph replays of several functions in turn, and the ways to time one function.

All inputs are rotated through copies larger than L2 (``precast.testing.rotation``) unless
``cold_l2_cache=False``. A function is warmed up before anything is measured, so module load,
compilation and handle creation stay out of the numbers.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from precast._base.log import get_logger
from precast.testing import cupti
from precast.testing.rotation import Call, rotation_for

# GPU time of one replay, which is long compared with the few microseconds of a graph's start.
_GRAPH_SECONDS = 2e-3
_WARM_UP = 3
_MOST_CALLS = 1000


def _same(seconds: float) -> float:
    return seconds


class Options(NamedTuple):
    """How often calls are repeated, and what happens between them."""

    dry_run_iters: int | None = None
    repeat_iters: int | None = None
    #: GPU time of the calls before the measurement, and of the samples, where no count is given.
    dry_run_seconds: float = 0.0
    repeat_seconds: float = 0.1
    #: Let the GPU cool between two samples.
    sleep: bool = False
    #: The least number of calls in a graph.
    graph_calls: int = 1
    #: The estimate of a call's time that all ranks agree on, so that they repeat equally often.
    agree: Callable[[float], float] = _same

    def repeats(self, seconds: float) -> int:
        """How many samples to take, of calls or replays that take so long."""
        if self.repeat_iters is not None:
            return self.repeat_iters
        return min(_MOST_CALLS, max(10, _ratio(self.repeat_seconds, self.agree(seconds))))

    def pause(self, milliseconds: float) -> None:
        """Sleep five times as long as a sample took, at most a second."""
        if self.sleep:
            time.sleep(min(milliseconds * 5e-3, 1.0))


def _ratio(whole: float, part: float) -> int:
    return math.ceil(whole / max(part, 1e-9))


def bench_side_by_side(
    functions: Mapping[str, Callable[..., Any]],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rounds: int | None = None,
    cold_l2_cache: bool = True,
    bytes_per_call: int | None = None,
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
    bytes_per_call : int, optional
        What a call touches of its arguments, for which copies are made. Default: all of them.

    Returns
    -------
    dict
        Name to the list of milliseconds.
    """
    calls = rotation_for(args, kwargs, cold_l2_cache, bytes_per_call)
    graphs = {}
    for name, fn in functions.items():
        warm_up(fn, calls, Options())
        graphs[name] = capture(fn, calls)
    slowest = max(graph.seconds for graph in graphs.values())
    return replay(graphs, rounds or Options().repeats(slowest))


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


def capture(
    fn: Callable[..., Any],
    calls: Sequence[Call],
    options: Options = Options(),  # noqa: B008
    long: bool = True,
) -> Graph:
    """Capture one call for each copy; if ``long``, repeated until the graph takes 2 ms."""
    graph = _capture(fn, calls, 1)
    once = options.agree(min(replay({"": graph}, 3)[""]) * 1e-3)
    turns = graph_turns(once, len(calls)) if long else 1
    turns = max(turns, math.ceil(options.graph_calls / len(calls)))
    if turns > 1:
        graph = _capture(fn, calls, turns)
    return graph._replace(seconds=once * graph.calls)


def graph_turns(seconds_per_call: float, copies: int) -> int:
    """How often a graph must go through all copies to take at least 2 ms."""
    return max(1, _ratio(_GRAPH_SECONDS, seconds_per_call * copies))


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


def time_with_graph(fn: Callable[..., Any], calls: Sequence[Call], options: Options) -> list[float]:
    """Milliseconds of one call; a sample is a replay of a graph."""
    graph = capture(fn, calls, options)
    count = options.repeats(graph.seconds)
    if not options.sleep:
        return replay({"": graph}, count)[""]
    samples = []
    for _ in range(count):
        samples += replay({"": graph}, 1)[""]
        options.pause(samples[-1] * graph.calls)
    return samples


def time_with_events(
    fn: Callable[..., Any], calls: Sequence[Call], options: Options
) -> list[float]:
    """Milliseconds of each call between two events, the launch included."""
    count = options.repeats(once(fn, calls[0]))
    pairs = [(_event(), _event()) for _ in range(count)]
    for index, (before, after) in enumerate(pairs):
        call = calls[index % len(calls)]
        before.record()
        fn(*call.args, **call.kwargs)
        after.record()
        if options.sleep:
            after.synchronize()
            options.pause(before.elapsed_time(after))
    torch.cuda.synchronize()
    return [float(before.elapsed_time(after)) for before, after in pairs]


def once(fn: Callable[..., Any], call: Call) -> float:
    """Seconds of one call between events, launch included."""
    start, end = _event(), _event()
    start.record()
    fn(*call.args, **call.kwargs)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def time_with_cupti(
    fn: Callable[..., Any], calls: Sequence[Call], options: Options, use_cuda_graph: bool
) -> list[float]:
    """Milliseconds in which the GPU worked for each call, or events if CUPTI cannot be used."""
    try:
        return _with_cupti(fn, calls, options, use_cuda_graph)
    except cupti.CuptiError as error:
        _say_no_cupti(str(error))
    return (time_with_graph if use_cuda_graph else time_with_events)(fn, calls, options)


@functools.cache  # One warning a process and reason.
def _say_no_cupti(reason: str) -> None:
    get_logger().info(
        "CUPTI cannot be used, so times are taken with CUDA events (%s)."
        ' Fix: pip install "precast[bench]"',
        reason,
    )


def _with_cupti(
    fn: Callable[..., Any], calls: Sequence[Call], options: Options, use_cuda_graph: bool
) -> list[float]:
    runs: list[Callable[[], Any]]
    with cupti.Session() as session:
        if use_cuda_graph:
            graph = capture(fn, calls, options, long=False)
            runs, per_run, seconds = [graph.graph.replay], graph.calls, graph.seconds
        else:
            runs = [functools.partial(fn, *call.args, **call.kwargs) for call in calls]
            per_run, seconds = 1, once(fn, calls[0])
        count = options.repeats(seconds)
        torch.cuda.synchronize()
        for index in range(count):
            with session.call(index):
                runs[index % len(runs)]()
            torch.cuda.synchronize()
            options.pause(seconds * 1e3)
    samples = cupti.call_milliseconds(session.spans, session.calls, count)
    return [sample / per_run for sample in samples]


def warm_up(fn: Callable[..., Any], calls: Sequence[Call], options: Options) -> None:
    """Call a function as often as asked for, or until it had its time, at least three times."""
    # torch requires a separate stream for work that is captured afterwards.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        count = _WARM_UP if options.dry_run_iters is None else options.dry_run_iters
        _run(fn, calls, count)
        if options.dry_run_iters is None and options.dry_run_seconds:
            seconds = options.agree(once(fn, calls[0]))
            _run(fn, calls, min(_MOST_CALLS, _ratio(options.dry_run_seconds, seconds)))
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _run(fn: Callable[..., Any], calls: Sequence[Call], count: int) -> None:
    for index in range(count):
        call = calls[index % len(calls)]
        fn(*call.args, **call.kwargs)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
