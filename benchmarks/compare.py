#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare two runs of the benchmarks, and mark cases that became slower beyond noise.

    python benchmarks/compare.py OLD NEW        files, or folders of files of the same names

Machines and days differ, so each GPU time is normalised: it is multiplied by the ceiling of its own
run that limits it (a bandwidth or a matrix rate). CPU times of a call are divided by that of
`torch.add` in the same run. A case is a regression if, after that,

- its median grew by more than --threshold (a new process alone can make this difference), and
- the range from the 20th to the 80th percentile of NEW is entirely above that of OLD.

Improvements are marked by the same rule. Exit status: 0; 1 if there is a regression; 2 if nothing
can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from precast.testing.report import print_table
from precast.testing.results import Run, load_run

CPU_UNIT = "CPU time of torch.add(x, x, out=o)"


class Measure(NamedTuple):
    """One time in microseconds, and the factor that normalises it."""

    median: float
    p20: float
    p80: float
    scale: float  # Multiplied by this, times of different machines can be compared.


class Change(NamedTuple):
    """A case that both runs have."""

    name: str
    old: Measure
    new: Measure
    threshold: float

    @property
    def ratio(self) -> float:
        """Normalised new time over the old one; above 1 is slower."""
        return self.new.median * self.new.scale / (self.old.median * self.old.scale)

    @property
    def verdict(self) -> str:
        old_low, old_high = (v * self.old.scale for v in (self.old.p20, self.old.p80))
        new_low, new_high = (v * self.new.scale for v in (self.new.p20, self.new.p80))
        if self.ratio > 1 + self.threshold and new_low > old_high:
            return "REGRESSION"
        if self.ratio < 1 / (1 + self.threshold) and new_high < old_low:
            return "improved"
        return ""


def measures(run: Run) -> dict[str, Measure]:
    """Every time of a run that is compared, by a name that both runs share."""
    if run.measures_engines:
        return dict(_of_engines(run))
    return dict(_of_ops(run) if run.measures_ops else _of_startup(run))


def _of_engines(run: Run) -> Iterator[tuple[str, Measure]]:
    """The time of a token, beside that of the other attention in the same run."""
    for record in run.records:
        time = 1e6 / record["tokens_per_second"]
        scale = record["other_tokens_per_second"] * 1e-6
        name = f"{record['engine']}, {record['name']}, beside {record['other']}"
        yield name, Measure(time, time, time, scale)


def _of_ops(run: Run) -> Iterator[tuple[str, Measure]]:
    for record in run.records:
        name = f"{record['op']} {record['shape']} {record['dtype']}"
        ceiling = run.ceilings.get(record["ceiling"] or "")
        scale = 1.0 if ceiling is None else float(ceiling["best"])
        yield name, _measure(record["gpu_us"]["precast"], scale, 1.0)


def _of_startup(run: Run) -> Iterator[tuple[str, Measure]]:
    records = [record for record in run.records if "p20" in record]
    unit = next((r["seconds"] for r in records if r["name"] == CPU_UNIT), None)
    for record in records:
        times = {**record, "median": record["seconds"]}
        yield record["name"], _measure(times, 1.0 if unit is None else 1e-6 / unit, 1e6)


def _measure(times: Mapping[str, Any], scale: float, microseconds: float) -> Measure:
    median, p20, p80 = (float(times[key]) * microseconds for key in ("median", "p20", "p80"))
    return Measure(median, p20, p80, scale)


def changes(old: Run, new: Run, threshold: float) -> list[Change]:
    """The cases of both runs, in the order of the new one."""
    before = measures(old)
    return [
        Change(name, before[name], measure, threshold)
        for name, measure in measures(new).items()
        if name in before
    ]


def table(found: Sequence[Change]) -> list[list[str]]:
    """Header and rows, with measured times and normalised ratios."""
    rows = [["case", "old us", "new us", "x time, normalised", "verdict"]]
    for change in found:
        times = [f"{change.old.median:.2f}", f"{change.new.median:.2f}", f"{change.ratio:.3f}"]
        rows.append([change.name, *times, change.verdict])
    return rows


def pairs(old: Path, new: Path) -> list[tuple[Path, Path]]:
    """Files to compare: the two given, or those of the same name in both folders."""
    if old.is_dir() and new.is_dir():
        names = sorted({p.name for p in old.glob("*.json")} & {p.name for p in new.glob("*.json")})
        return [(old / name, new / name) for name in names]
    if old.is_dir() != new.is_dir():
        raise ValueError(f"compare two files or two folders, got {old} and {new}")
    return [(old, new)]


def main(argv: Sequence[str] | None = None) -> int:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("compare.py", description=__doc__, formatter_class=text)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.03,
        help="relative growth of a GPU time that is still noise (default: %(default)s)",
    )
    parser.add_argument(
        "--cpu-threshold",
        type=float,
        default=0.15,
        help="the same for the CPU time of a call (default: %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="print the unchanged cases too")
    options = parser.parse_args(argv)
    compared, regressions = 0, 0
    try:
        for before, after in pairs(options.old, options.new):
            old, new = load_run(before), load_run(after)
            limit = options.threshold if new.measures_ops else options.cpu_threshold
            found = changes(old, new, limit)
            compared += len(found)
            regressions += sum(change.verdict == "REGRESSION" for change in found)
            report(old, new, [c for c in found if options.all or c.verdict])
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not compared:
        print("error: the two runs have no case in common", file=sys.stderr)
        return 2
    print(f"{compared} cases compared, {regressions} regressions")
    return int(regressions > 0)


def report(old: Run, new: Run, shown: Sequence[Change]) -> None:
    """Print the two runs, a warning if they should not be compared, and the rows."""
    print(f"{new.name}: {old.commit} ({old.date:%Y-%m-%d}) to {new.commit} ({new.date:%Y-%m-%d})")
    if old.gpu != new.gpu:
        print(f"  warning: other GPU: {old.gpu}, now {new.gpu}")
    for failure in new.failures:
        print("  not measured now: {op} {shape}: {error}".format(**failure))
    if shown:
        print_table(table(shown))


if __name__ == "__main__":
    raise SystemExit(main())
