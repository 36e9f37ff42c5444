# SPDX-License-Identifier: Apache-2.0
"""Check and measure the cases of a benchmark, and compare them with peers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import peers
import torch

import precast
from precast._base.dtypes import DTYPE_WORDS
from precast.testing import (
    Ceilings,
    Timing,
    Tolerance,
    assert_close,
    bench_cpu_time,
    bench_side_by_side,
    measure_matmul_ceiling,
    report,
    rotation,
)
from precast.testing.timing import capture

# Consecutive calls: few enough for the launch queue, many compared with the wait at their end.
_CALLS = 100

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


class Parts(NamedTuple):
    """The separate ops that a fused one replaces.

    Attributes
    ----------
    run : callable
        Takes the arguments of ``Case.make`` and calls our ops one after the other.
    bytes_moved : int
        The minimum that they must read and write together.
    """

    run: Callable[..., Any]
    bytes_moved: int


class Case(NamedTuple):
    """One op at one shape.

    Attributes
    ----------
    op : str
        The public function of ``precast``; peers are searched for the same name.
    shape : str
        Label of the row; together with ``op`` it identifies the case.
    bytes_moved : int
        The minimum that must be read and written.
    make : callable
        Makes fresh arguments on the current device, outputs included. It is called just before the
        case is measured, so that only one case's tensors are alive.
    bind : callable
        Converts a library's function to one that takes the arguments of ``make``.
    eager : callable, optional
        The same in plain PyTorch, for the peers ``torch`` and ``compile``.
    flops : int
        Operations of tensor cores, if there are any; they decide which ceiling applies.
    dtype : torch.dtype, optional
        The dtype of the case. Default: that of the first argument.
    parts : Parts, optional
        The ops that a fused op replaces, for the peer ``parts``.
    tolerances : mapping
        Tolerances of arguments, by position, that their dtype's tolerance does not suit.
    whole : callable, optional
        As ``bind``, for a second measurement: many consecutive calls without a graph, as in
        engines.
    draws : bool
        Whether the results are tokens drawn at random. They equal those of our reference except
        where logits round differently, and peers draw other tokens.
    tidy : callable, optional
        Converts results whose order varies to something that is equal for each call.
    close : Tolerance, optional
        Tolerance of the results, if that of their dtype does not suit.
    reads : bool
        Whether the op writes so little that the ceiling ``read`` applies.
    without : callable, optional
        The same call of ours without what the case is about, for the peer ``without``; it takes
        the arguments of ``make``.
    touches_part : bool
        Whether a call touches ``bytes_moved`` of much larger arguments, as few tokens read few of
        many experts. Copies that keep L2 cold are counted by them.
    """

    op: str
    shape: str
    bytes_moved: int
    make: Callable[[], tuple[Any, ...]]
    bind: Callable[[Callable[..., Any]], Callable[..., Any]]
    eager: Callable[..., Any] | None = None
    flops: int = 0
    dtype: torch.dtype | None = None
    parts: Parts | None = None
    tolerances: Mapping[int, Tolerance] = MappingProxyType({})
    whole: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    draws: bool = False
    tidy: Callable[[Any], Any] = lambda results: results
    close: Tolerance | None = None
    reads: bool = False
    without: Callable[..., Any] | None = None
    touches_part: bool = False

    @property
    def ours(self) -> Callable[..., Any]:
        return self.bind(getattr(precast, self.op))


class Settings(NamedTuple):
    """How to measure: the options of ``run.py``."""

    peers: Sequence[str]
    refcheck: bool = True
    rounds: int | None = None


def measure(case: Case, family: str, ceilings: Ceilings, settings: Settings) -> report.Result:
    """GPU and CPU time of one case and its peers."""
    args = case.make()
    if settings.refcheck:
        refcheck(case, args)
    others = peers.functions(case, family, settings.peers)
    functions = {"precast": case.ours, **able(case, others, args, in_graph=True)}
    touched = case.bytes_moved if case.touches_part else None
    samples = bench_side_by_side(functions, args, rounds=settings.rounds, bytes_per_call=touched)
    timings = {name: Timing.of_milliseconds(ms) for name, ms in samples.items()}
    cpu = {
        name: bench_cpu_time(fn, args, **cpu_effort(timings[name].median))
        for name, fn in functions.items()
    }
    dtype = case.dtype or args[0].dtype
    matmul = measure_matmul_ceiling(dtype) if case.flops else None
    memory = ceilings.read if case.reads else ceilings.elementwise
    ceiling = report.limit(case.bytes_moved, case.flops, memory, matmul)
    word = DTYPE_WORDS.get(str(dtype), str(dtype).removeprefix("torch."))
    expected = {}
    if case.parts is not None and "parts" in timings:
        expected["parts"] = case.parts.bytes_moved / case.bytes_moved
    fields = case.op, case.shape, word, case.bytes_moved, timings, cpu, ceiling, case.flops
    return report.Result(*fields, expected, whole_times(case, family, settings, args))


def whole_times(
    case: Case, family: str, settings: Settings, args: tuple[Any, ...]
) -> dict[str, Timing]:
    """Time of one of many consecutive calls, on the CPU or the GPU, whichever takes longer."""
    if case.whole is None:
        return {}
    case = case._replace(bind=case.whole)
    others = peers.functions(case, family, settings.peers)
    functions = {"precast": case.ours, **able(case, others, args)}
    calls = rotation.rotation_for(args, {}, True)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(2 + (settings.rounds or 12)):
        for name, fn in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for i in range(_CALLS):
                fn(*calls[i % len(calls)].args)
            torch.cuda.synchronize()
            if turn > 1:
                samples[name].append((time.perf_counter_ns() - start) * 1e-6 / _CALLS)
    return {name: Timing.of_milliseconds(found) for name, found in samples.items()}


def able(
    case: Case,
    others: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...],
    in_graph: bool = False,
) -> dict[str, Callable[..., Any]]:
    """The peers that take the arguments, also in a CUDA graph; prints why others are left out."""
    found = {}
    for name, fn in others.items():
        try:
            call = rotation.rotate(args, copies=2)[1]
            fn(*call.args)
            torch.cuda.synchronize()
            if in_graph:
                capture(fn, [call], long=False)
        except Exception as problem:  # A library may raise any exception.
            why = f"{type(problem).__name__}: {problem}".splitlines()[0]
            print(f"{case.op} {case.shape}: without {name}, {why}", file=sys.stderr, flush=True)
        else:
            found[name] = fn
    return found


def cpu_effort(seconds_per_call: float) -> dict[str, int]:
    """Samples of CPU time, and calls of each, that take about a fifth of a second together."""
    calls = max(3, min(200, int(0.05 / seconds_per_call)))
    return {"blocks": max(3, min(50, int(0.2 / (calls * seconds_per_call)))), "calls": calls}


def refcheck(case: Case, args: tuple[Any, ...], fn: Callable[..., Any] | None = None) -> None:
    """Compare a call with reference mode: its result and all arguments that it wrote."""
    actual = rotation.rotate(args, copies=2)[1].args
    expected = rotation.rotate(args, copies=2)[1].args
    got = case.tidy((fn or case.ours)(*actual))
    with precast.reference_mode():
        want = case.tidy((fn or case.ours)(*expected))
    for mine, theirs in zip(_results(got), _results(want), strict=True):
        if case.draws:
            wrong, count = int((mine != theirs).sum()), mine.numel()
            assert wrong <= 0.02 * count, f"{case.op}: result: {wrong} of {count} elements differ"
        else:
            limits = case.close
            name = f"{case.op}: result"
            assert_close(mine, theirs, name=name, **(limits._asdict() if limits else {}))
    for position, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(mine, torch.Tensor):
            limits = case.tolerances.get(position)
            name = f"{case.op}: argument {position}"
            assert_close(mine, theirs, name=name, **(limits._asdict() if limits else {}))


def _results(returned: Any) -> tuple[Any, ...]:
    """The results of a call, one or several."""
    if returned is None:
        return ()
    return returned if isinstance(returned, tuple) else (returned,)


def chosen(cases: Sequence[Case], only: Mapping[str, Sequence[str]]) -> list[Case]:
    """Select cases by ``op`` and ``shape``; an empty list selects all.

    Raises
    ------
    ValueError
        If no case has a selected name; the message lists the legal ones.
    """
    for field, wanted in only.items():
        legal = list(dict.fromkeys(getattr(case, field) for case in cases))
        unknown = [name for name in wanted if name not in legal]
        if unknown:
            raise ValueError(f"--{field}: unknown {', '.join(unknown)}; legal: {'; '.join(legal)}")
    return [
        case
        for case in cases
        if all(not wanted or getattr(case, field) in wanted for field, wanted in only.items())
    ]
