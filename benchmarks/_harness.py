# SPDX-License-Identifier: Apache-2.0
"""What every ``bench_<op>.py`` does with its cases: check, measure, print, write."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import _peers
import torch

import precast
from precast.testing import (
    Timing,
    assert_close,
    bench_cpu_time,
    bench_side_by_side,
    environment,
    measure_ceilings,
    report,
    rotation,
)

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


class Case(NamedTuple):
    """One op at one shape.

    ``make`` returns fresh arguments on the current device; it is called when the case's turn comes,
    so that only one case's tensors are alive. ``ours`` takes them as every adapter of
    ``_peers.py`` does.
    """

    op: str
    shape: str
    bytes_moved: int
    make: Callable[[], tuple[Any, ...]]
    ours: Callable[..., Any]


def arguments(description: str | None, dtypes: tuple[str, ...] = ("bf16", "f16")) -> Any:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0])
    parser.add_argument("--op", action="append", help="only this op (may be given several times)")
    parser.add_argument(
        "--peers",
        default=",".join(_peers.NAMES),
        help="which of %(default)s to measure where installed; 'none' for ours alone",
    )
    parser.add_argument(
        "--refcheck",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with the reference before timing",
    )
    parser.add_argument("--rounds", type=int, help="replays of each graph (default: 0.1 s of them)")
    return common(parser)


def common(parser: argparse.ArgumentParser) -> Any:
    """Add where the results go, and parse."""
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    parser.add_argument("--commit", help="the commit measured (default: $COMMIT, then git)")
    parsed = parser.parse_args()
    if "peers" in parsed:
        parsed.peers = [] if parsed.peers == "none" else parsed.peers.split(",")
        unknown = sorted(set(parsed.peers) - set(_peers.NAMES))
        if unknown:
            parser.error(f"--peers: unknown {unknown}; legal: {', '.join(_peers.NAMES)}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA device; torch sees none")
    return parsed


def run(cases: Iterable[Case], options: Any) -> None:
    """Measure every case, print the table, write what was asked for."""
    here = environment(options.commit, Path(__file__).parent)
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    report.print_circumstances(here, ceilings)
    cases = list(cases)
    legal = sorted({case.op for case in cases})
    if options.op and not set(options.op) <= set(legal):
        sys.exit(f"--op: legal here: {', '.join(legal)}")
    results = []
    for case in cases:
        if options.op and case.op not in options.op:
            continue
        results.append(measure(case, options, ceilings.elementwise.gbps))
        rows = report.table(results[-1:])
        print("  ".join(rows[1]), file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    rows = report.table(results)
    report.print_table(rows)
    if options.json:
        records = [result.record() for result in results]
        report.write_json(options.json, report.document(here, records, ceilings))
    if options.csv:
        report.write_csv(options.csv, rows, here)


def measure(case: Case, options: Any, ceiling: float) -> report.Result:
    """GPU and CPU time of one case and its peers."""
    args = case.make()
    if options.refcheck:
        refcheck(case.op, case.ours, args)
    functions = {"precast": case.ours, **_peers.peers(case.op, options.peers)}
    samples = bench_side_by_side(functions, args, rounds=options.rounds)
    timings = {name: Timing.of_milliseconds(ms) for name, ms in samples.items()}
    cpu = {
        name: bench_cpu_time(fn, args, blocks=cpu_blocks(timings[name].median))
        for name, fn in functions.items()
    }
    share = timings["precast"].bandwidth(case.bytes_moved) / ceiling
    dtype = next(word for word, dtype in DTYPES.items() if dtype == args[0].dtype)
    return report.Result(case.op, case.shape, dtype, case.bytes_moved, timings, cpu, share)


def cpu_blocks(seconds_per_call: float) -> int:
    """Samples of CPU time that keep a slow kernel's case under half a second."""
    return max(3, min(50, int(0.5 / (200 * seconds_per_call))))


def refcheck(name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """One call against the same call in reference mode: its result and all it wrote in place."""
    actual = rotation.rotate(args, copies=2)[1].args
    expected = rotation.rotate(args, copies=2)[1].args
    got = fn(*actual)
    with precast.reference_mode():
        want = fn(*expected)
    if got is not None:
        assert_close(got, want, name=f"{name}: result")
    for position, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(mine, torch.Tensor):
            assert_close(mine, theirs, name=f"{name}: argument {position}")
