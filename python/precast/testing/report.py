# SPDX-License-Identifier: Apache-2.0
"""One table, one JSON and one CSV for the results of every benchmark."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from precast.testing.ceilings import Ceilings
from precast.testing.stats import Timing

SCHEMA = 1


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
    share : float or None
        Our bandwidth over the elementwise ceiling of this run.
    """

    op: str
    shape: str
    dtype: str
    bytes_moved: int
    timings: Mapping[str, Timing]
    cpu: Mapping[str, Timing]
    share: float | None

    @property
    def ours(self) -> Timing:
        return self.timings["precast"]

    def ratio(self, peer: str) -> float:
        """The peer's median over ours: above 1 we are faster."""
        return self.timings[peer].median / self.ours.median

    def record(self) -> dict[str, Any]:
        """Plain data in microseconds, for JSON."""
        return {
            "op": self.op,
            "shape": self.shape,
            "dtype": self.dtype,
            "bytes_moved": self.bytes_moved,
            "gbps": round(self.ours.bandwidth(self.bytes_moved), 1),
            "share_of_elementwise": None if self.share is None else round(self.share, 4),
            "gpu_us": {name: _microseconds(t) for name, t in self.timings.items()},
            "ratio": {p: round(self.ratio(p), 3) for p in self.timings if p != "precast"},
            "cpu_us": {name: _microseconds(t) for name, t in self.cpu.items()},
        }


def _microseconds(timing: Timing) -> dict[str, float]:
    return {
        "median": round(timing.median * 1e6, 3),
        "p20": round(timing.p20 * 1e6, 3),
        "p80": round(timing.p80 * 1e6, 3),
        "std": round(timing.std * 1e6, 3),
        "samples": timing.samples,
    }


def table(results: Sequence[Result]) -> list[list[str]]:
    """Header and rows as text: what is printed, and what a CSV holds."""
    peers = list(dict.fromkeys(name for r in results for name in r.timings if name != "precast"))
    header = ["op", "shape", "dtype", "us", "p20-p80", "GB/s", "of ceiling", "CPU us"]
    rows = [[*header, *(f"x {peer}" for peer in peers)]]
    for result in results:
        ours = result.ours
        cpu = result.cpu.get("precast")
        rows.append(
            [
                result.op,
                result.shape,
                result.dtype,
                f"{ours.median * 1e6:.2f}",
                f"{ours.p20 * 1e6:.2f}-{ours.p80 * 1e6:.2f}",
                f"{ours.bandwidth(result.bytes_moved):.1f}",
                "-" if result.share is None else f"{result.share:.3f}",
                "-" if cpu is None else f"{cpu.median * 1e6:.2f}",
                *(f"{result.ratio(p):.2f}" if p in result.timings else "-" for p in peers),
            ]
        )
    return rows


def print_table(rows: Sequence[Sequence[str]], file: TextIO | None = None) -> None:
    """Columns as wide as their widest cell; text to the left, numbers to the right."""
    file = file or sys.stdout
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if _is_number(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip(), file=file, flush=True)


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell == "-"


def print_circumstances(
    environment: Mapping[str, str], ceilings: Ceilings | None = None, file: TextIO | None = None
) -> None:
    """Where this runs and what the GPU reaches, above the table."""
    file = file or sys.stdout
    print(", ".join(f"{name} {value}" for name, value in environment.items()), file=file)
    for ceiling in ceilings or ():
        others = ", ".join(f"{kernel} {gbps:.0f}" for kernel, gbps in ceiling.all_gbps.items())
        print(f"ceiling {ceiling.name}: {ceiling.gbps:.0f} GB/s ({others})", file=file, flush=True)


def document(
    environment: Mapping[str, str],
    results: Sequence[Mapping[str, Any]],
    ceilings: Ceilings | None = None,
) -> dict[str, Any]:
    """Everything of one run, as it stands in ``benchmarks/results/``."""
    data: dict[str, Any] = {"schema": SCHEMA, "environment": dict(environment)}
    if ceilings is not None:
        data["ceilings_gbps"] = {
            ceiling.name: {
                "best": round(ceiling.gbps, 1),
                "kernel": ceiling.kernel,
                "all": {kernel: round(gbps, 1) for kernel, gbps in ceiling.all_gbps.items()},
            }
            for ceiling in ceilings
        }
    data["results"] = list(results)
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a run's document, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
    """The printed table, with the circumstances as further columns of each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*rows[0], *environment])
        writer.writerows([*row, *environment.values()] for row in rows[1:])
