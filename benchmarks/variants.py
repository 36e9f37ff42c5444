#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time other values of constants in the kernels beside those of the checkout, in turn.

    python benchmarks/variants.py --variant turns=CHANGES [--variant parts=CHANGES ...] -- ARGUMENTS

ARGUMENTS are those of benchmarks/run.py, which each variant runs in a process of its own. CHANGES
are `FILE: OLD -> NEW`, with `;;` between several of them: OLD stands exactly once in the file. For
instance, whether a decode should have fewer splits:

    python benchmarks/variants.py \\
        --variant "few=include/precast/attention/plan.cuh: kManySplits = 20 -> kManySplits = 12" \\
        -- --routine attention --op BatchDecodeWithPagedKVCacheWrapper --peers none

A variant is a copy of the checkout whose modules are compiled before anything is timed, by nvcc
into a cache of its own. Then all run in turn, the checkout (`base`) first, --rounds times. The
table has the medians of the rounds and their ratio to that of the base: above 1 is faster. Whether
a variant is right is not checked beyond the comparison with the reference that run.py makes.
Exit status: 0; 1 if a run failed; 2 for a wrong change.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import compare

from precast.testing.report import print_table
from precast.testing.results import load_run

ROOT = Path(__file__).resolve().parents[1]
BASE = "base"
#: What the kernels are built from, and what measures them.
PARTS = ("include", "csrc", "python", "aot_configs", "benchmarks", "pyproject.toml")


class Change(NamedTuple):
    """A text of a file, which stands there once, and what takes its place."""

    file: Path
    old: str
    new: str


def parse_variant(text: str) -> tuple[str, list[Change]]:
    """The name of a variant, and its changes."""
    name, _, changes = text.partition("=")
    found = []
    for change in changes.split(";;"):
        file, _, texts = change.partition(":")
        old, arrow, new = (part.strip() for part in texts.partition("->"))
        if not (file and old and arrow):
            raise ValueError(f"{name}: a change must be FILE: OLD -> NEW, got {change!r}")
        found.append(Change(Path(file.strip()), old, new))
    if not name or name == BASE:
        raise ValueError(f"a variant needs a name other than {BASE!r}, got {text!r}")
    return name, found


def apply(changes: Sequence[Change], tree: Path) -> None:
    """Make the changes in a copy of the checkout."""
    for change in changes:
        path = tree / change.file
        if not path.is_file():
            raise ValueError(f"{change.file}: no such file in {ROOT}")
        text = path.read_text()
        if text.count(change.old) != 1:
            count = text.count(change.old)
            raise ValueError(f"{change.file}: {change.old!r} must stand there once, got {count}")
        path.write_text(text.replace(change.old, change.new))


def copy_tree(folder: Path) -> Path:
    """A copy of what kernels are built from."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, tree / part, ignore=ignored)
        else:
            shutil.copy(source, tree / part)
    return tree


def environment(folder: Path) -> dict[str, str]:
    """Compile into a cache of the variant, and find no prebuilt modules."""
    found = {k: v for k, v in os.environ.items() if not k.startswith("PRECAST_")}
    paths = [str(folder / "tree" / "python"), os.environ.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return found | {"PRECAST_JIT": "auto", "PRECAST_CACHE_DIR": str(folder / "cache")}


def run(folder: Path, arguments: Sequence[str], out: Path) -> bool:
    """One run of the benchmarks; what it prints is kept beside its results."""
    out.mkdir(parents=True)
    command = [sys.executable, "benchmarks/run.py", *arguments, "--json", str(out)]
    with (out / "log.txt").open("w") as log:
        done = subprocess.run(
            command,
            cwd=folder / "tree",
            env=environment(folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        print(f"error: {folder.name}: status {done.returncode}", file=sys.stderr)
        print((out / "log.txt").read_text()[-2000:], file=sys.stderr)
    return done.returncode == 0


def medians(out: Path) -> Iterator[tuple[str, float]]:
    """Every case of a run and its time in microseconds."""
    for path in sorted(out.glob("*.json")):
        for name, measure in compare.measures(load_run(path)).items():
            yield name, measure.median


def table(times: Mapping[str, Mapping[str, Sequence[float]]]) -> list[list[str]]:
    """Header and rows: of each case the time of the base, and of each variant time and ratio."""
    others = [name for name in times if name != BASE]
    rows = [["case", f"{BASE} us", *(word for name in others for word in (f"{name} us", "x"))]]
    for case, samples in times[BASE].items():
        base = statistics.median(samples)
        row = [case, f"{base:.2f}"]
        for name in others:
            found = times[name].get(case)
            own = statistics.median(found) if found else None
            row += ["", ""] if own is None else [f"{own:.2f}", f"{base / own:.3f}"]
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("variants.py", description=__doc__, formatter_class=form)
    parser.add_argument("--variant", action="append", required=True, metavar="NAME=CHANGES")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant (default: 3)")
    parser.add_argument("arguments", nargs="*", help="of benchmarks/run.py, after --")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="precast_variants_") as place:
        folders = {BASE: Path(place) / BASE}
        try:
            variants = dict(parse_variant(text) for text in options.variant)
            for name, changes in {BASE: [], **variants}.items():
                folders[name] = Path(place) / name
                apply(changes, copy_tree(folders[name]))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        # Compiling leaves most of the GPU alone, so all do it at once.
        with ThreadPoolExecutor(len(folders)) as pool:
            compiled = pool.map(
                lambda item: run(item, options.arguments, item / "first"), folders.values()
            )
            if not all([*compiled]):
                return 1
        times: dict[str, dict[str, list[float]]] = {name: {} for name in folders}
        for i in range(options.rounds):
            for name, folder in folders.items():
                if not run(folder, options.arguments, folder / f"round{i}"):
                    return 1
                for case, median in medians(folder / f"round{i}"):
                    times[name].setdefault(case, []).append(median)
    print_table(table(times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
