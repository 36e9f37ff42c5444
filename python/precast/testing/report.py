# SPDX-License-Identifier: Apache-2.0
"""One table, one JSON and one CSV for the results of every benchmark.

A measurement becomes a :class:`Result`, and a result becomes a *record*: plain data in
microseconds, as in a result file. Printing, CSV, pictures and ``docs/performance.md`` use records,
so a run looks the same when it is read back (``precast.testing.results``).
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

from precast.testing.ceilings import Ceiling
from precast.testing.stats import Timing

#: Version of the JSON documents. 2: ceilings carry their unit, records their ceiling and FLOPs.
SCHEMA = 2

Record = Mapping[str, Any]


class Result(NamedTuple):
    """One call at one shape: ours, and the same call by each peer that is installed.

    Attributes
    ----------
    bytes_moved : int
        The least that the call must read and write; weights are left out.
    timings : mapping of str to Timing
        GPU time by name; "precast" is ours.
    cpu : mapping of str to Timing
        CPU time of one call by name.
    ceiling : Ceiling or None
        The limit of the call in this run, see :func:`limit`.
    flops : int
        Operations of tensor cores; 0 if there are none.
    expected : mapping of str to float
        The factor by which a peer should be slower, from the bytes that it moves.
    whole : mapping of str to Timing
        Time of one of many consecutive calls from Python, by name, if it was measured.
    """

    op: str
    shape: str
    dtype: str
    bytes_moved: int
    timings: Mapping[str, Timing]
    cpu: Mapping[str, Timing]
    ceiling: Ceiling | None = None
    flops: int = 0
    expected: Mapping[str, float] = MappingProxyType({})
    whole: Mapping[str, Timing] = MappingProxyType({})

    @property
    def ours(self) -> Timing:
        return self.timings["precast"]

    def ratio(self, peer: str) -> float:
        """The peer's median over ours; above 1, precast is faster."""
        return self.timings[peer].median / self.ours.median

    @property
    def gbps(self) -> float:
        """GB/s (1e9 bytes a second) at the median."""
        return self.ours.bandwidth(self.bytes_moved)

    @property
    def tflops(self) -> float | None:
        """TFLOP/s at the median, None for a call without matrix products."""
        return self.flops / self.ours.median * 1e-12 if self.flops else None

    @property
    def share(self) -> float | None:
        """The share of the ceiling."""
        if self.ceiling is None:
            return None
        reached = self.gbps if self.ceiling.unit == "GB/s" else self.tflops or 0.0
        return reached / self.ceiling.best

    def record(self) -> dict[str, Any]:
        """Plain data in microseconds, for JSON."""
        whole = {name: _microseconds(t) for name, t in self.whole.items()}
        return {
            "op": self.op,
            "shape": self.shape,
            "dtype": self.dtype,
            "bytes_moved": self.bytes_moved,
            "flops": self.flops,
            "gbps": round(self.gbps, 1),
            "tflops": None if self.tflops is None else round(self.tflops, 2),
            "ceiling": None if self.ceiling is None else self.ceiling.name,
            "share": None if self.share is None else round(self.share, 4),
            "gpu_us": {name: _microseconds(t) for name, t in self.timings.items()},
            "ratio": {p: round(self.ratio(p), 3) for p in self.timings if p != "precast"},
            "expected": {p: round(ratio, 3) for p, ratio in self.expected.items()},
            "cpu_us": {name: _microseconds(t) for name, t in self.cpu.items()},
            **({"whole_us": whole} if whole else {}),
        }


def limit(bytes_moved: int, flops: int, memory: Ceiling, matmul: Ceiling | None) -> Ceiling:
    """The ceiling that limits a call: bandwidth, or the tensor cores if it has FLOPs."""
    if not flops or matmul is None:
        return memory
    by_memory = bytes_moved / (memory.best * 1e9)
    return memory if by_memory >= flops / (matmul.best * 1e12) else matmul


def _microseconds(timing: Timing) -> dict[str, float]:
    return {
        "median": round(timing.median * 1e6, 3),
        "p20": round(timing.p20 * 1e6, 3),
        "p80": round(timing.p80 * 1e6, 3),
        "std": round(timing.std * 1e6, 3),
        "samples": timing.samples,
    }


def peers_of(records: Iterable[Record]) -> list[str]:
    """The peers of these records, in the order of their columns."""
    return list(dict.fromkeys(name for record in records for name in record["ratio"]))


def table(records: Sequence[Record]) -> list[list[str]]:
    """Header and rows as text, for the terminal, a CSV or a page."""
    peers = peers_of(records)
    rates = ["GB/s"] + ["TFLOP/s"] * any(record["flops"] for record in records)
    header = ["op", "shape", "dtype", "us", "p20-p80", *rates, "of ceiling", "CPU us"]
    by_bytes = [p for p in peers if any(p in r.get("expected", ()) for r in records)]
    columns = [*(f"x {peer}" for peer in peers), *(f"x {peer} by bytes" for peer in by_bytes)]
    called = [p for p in peers if any(p in r.get("whole_us", ()) for r in records)]
    whole = ["precast", *called] if any("whole_us" in r for r in records) else []
    columns += ["whole us" if name == "precast" else f"x {name} whole" for name in whole]
    rows = [[*header, *columns]]
    for record in records:
        ours = record["gpu_us"]["precast"]
        cpu = record["cpu_us"].get("precast")
        reached = [f"{record['gbps']:.1f}", _cell(record["tflops"], 1)]
        rows.append(
            [
                record["op"],
                record["shape"],
                record["dtype"],
                f"{ours['median']:.2f}",
                f"{ours['p20']:.2f}-{ours['p80']:.2f}",
                *reached[: len(rates)],
                _cell(record["share"], 3),
                "-" if cpu is None else f"{cpu['median']:.2f}",
                *(_cell(record["ratio"].get(peer), 2) for peer in peers),
                *(_cell(record.get("expected", {}).get(peer), 2) for peer in by_bytes),
                *(_cell(_whole(record, name), 2) for name in whole),
            ]
        )
    return rows


def figure_table(records: Sequence[Record]) -> list[list[str]]:
    """Header and rows of records that have a name and figures, as micro-benchmarks make them."""
    units = list(dict.fromkeys(unit for record in records for unit in record["figures"]))
    rows = [["case", *units]]
    for record in records:
        figures = record["figures"]
        cells = (f"{figures[unit]:.4g}" if unit in figures else "-" for unit in units)
        rows.append([record["name"], *cells])
    return rows


def _whole(record: Record, name: str) -> float | None:
    """Ours in microseconds, a peer's as a multiple of it."""
    medians = {key: timing["median"] for key, timing in record.get("whole_us", {}).items()}
    if name not in medians:
        return None
    median: float = medians[name]
    return median if name == "precast" else median / medians["precast"]


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def print_table(rows: Sequence[Sequence[str]], file: TextIO | None = None) -> None:
    """Columns as wide as their widest cell; text to the left, numbers to the right."""
    file = file or sys.stdout
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if is_number(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip(), file=file, flush=True)


def is_number(cell: str) -> bool:
    """Whether a cell of :func:`table` belongs to the right of its column."""
    return cell[:1].isdigit() or cell == "-"


def print_circumstances(
    environment: Mapping[str, str], ceilings: Iterable[Ceiling] = (), file: TextIO | None = None
) -> None:
    """The environment and the ceilings, to print above the table."""
    file = file or sys.stdout
    print(", ".join(f"{name} {value}" for name, value in environment.items()), file=file)
    for ceiling in ceilings:
        others = ", ".join(f"{kernel} {value:.4g}" for kernel, value in ceiling.all.items())
        line = f"ceiling {ceiling.name}: {ceiling.best:.4g} {ceiling.unit} ({others})"
        print(line, file=file, flush=True)


def document(
    environment: Mapping[str, str],
    records: Sequence[Record],
    ceilings: Iterable[Ceiling] = (),
    failures: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """One run, as a file of ``benchmarks/results/`` holds it."""
    data: dict[str, Any] = {"schema": SCHEMA, "environment": dict(environment)}
    measured = {
        ceiling.name: {
            "unit": ceiling.unit,
            "best": round(ceiling.best, 3),
            "kernel": ceiling.kernel,
            "all": {kernel: round(value, 3) for kernel, value in ceiling.all.items()},
        }
        for ceiling in ceilings
    }
    if measured:
        data["ceilings"] = measured
    data["results"] = list(records)
    if failures:
        data["failures"] = list(failures)
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a run's document, and create its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
    """The printed table, with the environment as further columns of each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*rows[0], *environment])
        writer.writerows([*row, *environment.values()] for row in rows[1:])
