#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run any benchmark with one command.

    python benchmarks/run.py                           all routines, bf16
    python benchmarks/run.py --list                    routines, peers and what is installed
    python benchmarks/run.py --routine norm --op rmsnorm --shape "[1024, 4096]" --peers none
    python benchmarks/run.py --testlist LIST --json out/ --plot out/

A routine is a file bench_<name>.py beside this one. A test list holds one command line of this
program per line; `#` starts a comment, and a line inherits the other options from the command line.
Exit status: 0; 1 if a case failed (the others are still measured) or the program was stopped (what
has been measured is still written); 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PREFIX = "bench_"
DTYPES = ("bf16", "f16")  # The default of a routine.
OUTPUTS = {"json": (".json",), "csv": (".csv",), "plot": (".png", ".svg", ".pdf")}

sys.path.insert(0, str(HERE))


class Job(NamedTuple):
    """One routine in one dtype, and its selected cases."""

    routine: str
    dtype: str
    cases: list[Any]
    settings: Any


def routines() -> dict[str, Path]:
    """Every routine by name."""
    return {path.stem.removeprefix(PREFIX): path for path in sorted(HERE.glob(f"{PREFIX}*.py"))}


def load(name: str) -> Any:
    return importlib.import_module(PREFIX + name)


def parser() -> argparse.ArgumentParser:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "run.py", description=__doc__, formatter_class=text, allow_abbrev=False
    )
    add = parser.add_argument
    add("--list", action="store_true", help="list routines and peers, and measure nothing")
    add("--routine", action="append", metavar="NAME", help="one of --list (repeatable)")
    add("--testlist", type=Path, metavar="FILE", help="one command line of this program per line")
    add("--dtype", help="element type (default: the routine's first, bf16)")
    add("--op", action="append", default=[], help="only this function (repeatable)")
    add("--shape", action="append", default=[], help="only this shape, as printed (repeatable)")
    add("--peers", type=_names, help="comma-separated; 'none' measures ours alone (default: all)")
    add(
        "--refcheck",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with the reference before timing",
    )
    add("--rounds", type=int, help="replays of each graph (default: 0.1 s of them)")
    add("--commit", help="the commit measured (default: $COMMIT, then git)")
    for kind, endings in OUTPUTS.items():
        add(
            f"--{kind}",
            type=Path,
            metavar="PATH",
            help=f"a {' or '.join(endings)} file, or a folder for <routine>_<dtype>{endings[0]}",
        )
    return parser


def _names(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


def command_lines(options: argparse.Namespace, error: Callable[[str], Any]) -> list[Any]:
    """The command line, or the lines of its test list, each with all options."""
    if options.testlist is None:
        return [options]
    try:
        text = options.testlist.read_text(encoding="utf-8")
    except OSError as problem:
        error(f"--testlist: {problem}")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        inherited = copy.deepcopy(options)
        # Lists of the line replace those of the command line instead of adding to them.
        for name in ("routine", "op", "shape"):
            if f"--{name}" in {word.split("=")[0] for word in words}:
                setattr(inherited, name, [])
        line_parser = parser()
        where = f"{options.testlist}, line {number}: "
        line_parser.error = lambda message, where=where: error(where + message)  # type: ignore[assignment]
        parsed = line_parser.parse_args(words, namespace=inherited)
        same = (*OUTPUTS, "testlist", "list", "commit")
        if any(getattr(parsed, name) != getattr(options, name) for name in same):
            error(f"{where}only the command line may have {', '.join(same)}")
        parsed.where = where
        found.append(parsed)
    return found or error(f"--testlist: {options.testlist} has no command line")


def jobs_of(line: Any, error: Callable[[str], Any]) -> list[Job]:
    """The jobs of one command line; a wrong name is an error before the first measurement."""
    import _harness
    import peers

    known = routines()
    wanted = line.routine or [name for name in known if hasattr(load(name), "cases")]
    for name in wanted:
        if name not in known:
            error(f"--routine: unknown {name}; legal: {', '.join(known)}")
    chosen_peers = peers.names() if line.peers is None else line.peers
    for name in chosen_peers:
        if name not in peers.names():
            error(f"--peers: unknown {name}; legal: {', '.join(peers.names())}, none")
    settings = _harness.Settings(chosen_peers, line.refcheck, line.rounds)
    jobs = []
    for name in dict.fromkeys(wanted):
        module = load(name)
        if not hasattr(module, "cases"):
            jobs.append(Job(name, "", [], settings))
            continue
        legal = getattr(module, "DTYPES", DTYPES)
        dtype = line.dtype or legal[0]
        if dtype not in legal:
            error(f"--dtype: {name} has no {dtype}; legal: {', '.join(legal)}")
        cases = list(module.cases(_harness.DTYPES[dtype]))
        only = {"op": line.op, "shape": line.shape}
        if len(wanted) > 1:  # Only one of the routines has to know a name.
            names = {field: {getattr(case, field) for case in cases} for field in only}
            if any(want and not names[field] & set(want) for field, want in only.items()):
                continue
            only = {field: [w for w in want if w in names[field]] for field, want in only.items()}
        try:
            jobs.append(Job(name, dtype, _harness.chosen(cases, only), settings))
        except ValueError as problem:
            error(str(problem))
    if not any(job.cases or not job.dtype for job in jobs):
        error("no case matches --op and --shape")
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(argv)
    if options.list:
        print_list()
        return 0
    jobs: list[Job] = []
    for line in command_lines(options, command.error):

        def error(message: str, where: str = getattr(line, "where", "")) -> Any:
            return command.error(where + message)

        jobs += jobs_of(line, error)
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.routine, job.dtype), []).append(job)
    for kind in OUTPUTS:
        if len(groups) > 1 and _is_file(getattr(options, kind), kind):
            command.error(f"--{kind}: several routines need a folder, got {getattr(options, kind)}")
    import torch

    if not torch.cuda.is_available():
        print("error: benchmarks need a CUDA device; torch sees none", file=sys.stderr)
        return 1
    failed = False
    # As Ctrl-C: `timeout` and a cluster's scheduler stop a program so.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for (routine, dtype), group in groups.items():
        print(f"\n== {routine} {dtype}".rstrip(), flush=True)
        paths = {kind: _output(getattr(options, kind), kind, routine, dtype) for kind in OUTPUTS}
        if dtype:
            done = run_group(group, paths, options.commit)
            failed |= done is not True
            if done is None:
                break
        else:
            failed |= not run_own(routine, paths, options.commit)
    return int(failed)


def run_group(group: list[Job], paths: dict[str, Path | None], commit: str | None) -> bool | None:
    """Measure, print and write the jobs of one routine and dtype.

    True if all cases succeeded, None if the program was stopped.
    """
    import _harness
    import peers
    import torch

    from precast.testing import environment, measure_ceilings, report
    from precast.testing.results import Run

    here = environment(commit, HERE, peers.distributions())
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    report.print_circumstances(here, ceilings)
    results, failures, stopped = [], [], False
    for job, case in [(of, case) for of in group for case in of.cases]:
        try:
            result = _harness.measure(case, job.routine, ceilings, job.settings)
        except KeyboardInterrupt:
            stopped = True
            failures.append({"op": case.op, "shape": case.shape, "error": "stopped here"})
            break
        except Exception as problem:  # The next case may work.
            text = f"{type(problem).__name__}: {problem}"
            failures.append({"op": case.op, "shape": case.shape, "error": text})
            print(f"FAILED {case.op} {case.shape}: {text}", file=sys.stderr, flush=True)
        else:
            results.append(result)
            row = report.table([result.record()])[1]
            print("  ".join(row), file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    records = [result.record() for result in results]
    used = {r.ceiling.name: r.ceiling for r in results if r.ceiling is not None}
    every = {**{c.name: c for c in ceilings}, **used}.values()
    if records:
        report.print_table(report.table(records))
    for failure in failures:
        print("FAILED {op} {shape}: {error}".format(**failure))
    data = report.document(here, records, every, failures)
    if paths["json"]:
        report.write_json(paths["json"], data)
    if paths["csv"] and records:
        report.write_csv(paths["csv"], report.table(records), here)
    if paths["plot"] and records:
        from precast.testing import plots

        name = f"{group[0].routine}_{group[0].dtype}"
        plots.save_run(Run(name, here, records, data["ceilings"]), paths["plot"])
    return None if stopped else not failures


def run_own(routine: str, paths: dict[str, Path | None], commit: str | None) -> bool:
    """Run a routine that has no list of cases and measures and writes by itself."""
    arguments = ["--commit", commit] if commit else []
    for kind in ("json", "csv"):
        arguments += [f"--{kind}", str(paths[kind])] if paths[kind] else []
    try:
        load(routine).main(arguments)
    except Exception as problem:
        print(f"FAILED {routine}: {type(problem).__name__}: {problem}", file=sys.stderr)
        return False
    return True


def print_list() -> None:
    """Routines with the first line of their description, then peers."""
    import peers

    width = max(map(len, [*routines(), *peers.names()]))
    print("routines:")
    for name, path in routines().items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        print(f"  {name:{width}}  {text.splitlines()[0] if text else ''}")
    print("peers:")
    for name in peers.names():
        print(f"  {name:{width}}  {'installed' if peers.is_installed(name) else 'not installed'}")


def _is_file(path: Path | None, kind: str) -> bool:
    return path is not None and path.suffix in OUTPUTS[kind]


def _output(path: Path | None, kind: str, routine: str, dtype: str) -> Path | None:
    if path is None or _is_file(path, kind):
        return path
    name = "_".join(filter(None, (routine, dtype)))
    return path / (name + OUTPUTS[kind][0])


if __name__ == "__main__":
    raise SystemExit(main())
