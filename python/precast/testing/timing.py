# SPDX-License-Identifier: Apache-2.0
"""How long a call takes on the GPU: CUDA events, CUDA-graph replay, and several calls side by side.

All inputs are rotated through copies larger than L2 (``precast.testing.rotation``) unless
``cold_l2_cache=False``. A function is warmed up before anything is measured, so module load,
compilation and handle creation stay out of the numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from precast.testing.rotation import Call, rotation_for
from precast.testing.stats import Timing

# GPU time of one replay: long against the few microseconds in which a graph starts.
_GRAPH_SECONDS = 2e-3
# GPU time of a whole measurement where the caller does not say how often to repeat.
_TOTAL_SECONDS = 0.1
_WARM_UP = 3


def bench_gpu_time(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    use_cuda_graph: bool = False,
    cold_l2_cache: bool = True,
) -> tuple[float, float]:
    """Median and standard deviation of the GPU time of ``fn(*args, **kwargs)``, in seconds.

    Parameters
    ----------
    fn : callable
        Launches work on the current stream. It may write its arguments in place.
    args, kwargs
        Its arguments; tensors among them are copied so that each call finds a cold L2.
    dry_run_iters : int, optional
        Calls before the measurement; default 3.
    repeat_iters : int, optional
        Samples (calls, or replays of a graph); default what 0.1 s of GPU time hold, 10 to 1000.
    use_cuda_graph : bool
        Replay a CUDA graph of many calls, which takes the launch from the CPU out of the time.
    cold_l2_cache : bool
        Rotate the arguments through copies larger than L2.

    Returns
    -------
    tuple of float
        ``(median, std)`` in seconds for one call.
    """
    measure = bench_gpu_time_with_cudagraph if use_cuda_graph else bench_gpu_time_with_cuda_event
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


def bench_gpu_time_with_cuda_event(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    cold_l2_cache: bool = True,
) -> list[float]:
    """Milliseconds of each call, between two CUDA events.

    Kernels shorter than their launch (some microseconds) need ``bench_gpu_time_with_cudagraph``.
    """
    calls = rotation_for(args, kwargs, cold_l2_cache)
    return _with_events(fn, calls, dry_run_iters, repeat_iters)


def bench_gpu_time_with_cudagraph(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    cold_l2_cache: bool = True,
) -> list[float]:
    """Milliseconds of one call, one sample a replay of a graph that holds a call for each copy."""
    calls = rotation_for(args, kwargs, cold_l2_cache)
    _warm_up(fn, calls, dry_run_iters)
    graph = capture(fn, calls)
    return replay({"": graph}, repeat_iters or _repeats(graph.seconds))[""]


def bench_side_by_side(
    functions: Mapping[str, Callable[..., Any]],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rounds: int | None = None,
    cold_l2_cache: bool = True,
) -> dict[str, list[float]]:
    """Milliseconds of one call of each function, measured in alternation on the same copies.

    Clocks and temperature drift during a run; replays in turn give every function the same share
    of that, so that a ratio of two medians is a property of the functions.

    Parameters
    ----------
    functions : mapping of str to callable
        Each is called with the same arguments and captured in its own graph.
    rounds : int, optional
        Replays of each graph; default as many as 0.1 s of the slowest hold, 10 to 1000.

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
    seconds: float  # GPU time of one replay, roughly
    outputs: list[Any]  # what the calls returned: its memory belongs to the graph

    def enqueue(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Launch one replay between two events, without waiting for it."""
        start, end = _event(), _event()
        start.record()
        self.graph.replay()
        end.record()
        return start, end


def replay(graphs: Mapping[str, Graph], rounds: int) -> dict[str, list[float]]:
    """Replay graphs in turn; milliseconds of one call for each graph and round.

    All replays are queued before the first is waited for, so that the GPU never waits for the CPU
    between an event and the graph that follows it. One more round, dropped, fills the queue.
    """
    queued = [(name, graphs[name].enqueue()) for _ in range(rounds + 1) for name in graphs]
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for name, (start, end) in queued[len(graphs) :]:
        samples[name].append(float(start.elapsed_time(end)) / graphs[name].calls)
    return samples


def capture(fn: Callable[..., Any], calls: Sequence[Call]) -> Graph:
    """A graph with one call for each copy, or whole multiples of that if they are very short."""
    graph = _capture(fn, calls, 1)
    once = min(replay({"": graph}, 3)[""]) * 1e-3
    turns = graph_turns(once, len(calls))
    if turns > 1:
        graph = _capture(fn, calls, turns)
    return graph._replace(seconds=once * graph.calls)


def graph_turns(seconds_per_call: float, copies: int) -> int:
    """How often a graph goes through all copies, so that one replay lasts at least 2 ms."""
    return max(1, math.ceil(_GRAPH_SECONDS / max(seconds_per_call * copies, 1e-9)))


def _capture(fn: Callable[..., Any], calls: Sequence[Call], turns: int) -> Graph:
    # As many results stay alive as there are copies: a function that allocates its result must not
    # write the same, cached memory each time.
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


def _with_events(
    fn: Callable[..., Any],
    calls: Sequence[Call],
    dry_run_iters: int | None,
    repeat_iters: int | None,
) -> list[float]:
    _warm_up(fn, calls, dry_run_iters)
    start, end = _event(), _event()
    start.record()
    fn(*calls[0].args, **calls[0].kwargs)
    end.record()
    end.synchronize()
    count = repeat_iters or _repeats(float(start.elapsed_time(end)) * 1e-3)
    pairs = [(_event(), _event()) for _ in range(count)]
    for index, (before, after) in enumerate(pairs):
        call = calls[index % len(calls)]
        before.record()
        fn(*call.args, **call.kwargs)
        after.record()
    torch.cuda.synchronize()
    return [float(before.elapsed_time(after)) for before, after in pairs]


def _warm_up(fn: Callable[..., Any], calls: Sequence[Call], count: int | None) -> None:
    # On a stream of its own, as torch asks for work that is captured afterwards.
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
