# SPDX-License-Identifier: Apache-2.0
"""Show, prune or clear the JIT cache of this user.

    precast cache info
    precast cache prune --older-than 30 --max-size 2G

info   lists the builds, and whether this precast would still use them
prune  removes builds that are damaged or made from other sources, then those that are too old or
       exceed the size limit
clear  removes all builds

prune and clear also remove what killed compiles have left. Whatever else lies in the folder, and
what belongs to another user or is reached by a symbolic link, is named and stays.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from typing import TYPE_CHECKING

from precast.cli import _output
from precast.cli._builds import Build, judged_builds
from precast.cli._output import UsageError

if TYPE_CHECKING:
    from precast._jit.cache import Contents

EXIT_CODES = (0, 2, 3)
JSON = {
    "directory": "of info: the cache",
    "size": "of info: bytes in it",
    "builds": "of info: its builds (folder, name, target, state: ok, stale or damaged, reason, "
    "...)",
    "leftovers": "folders that killed compiles have left; prune and clear remove them",
    "foreign": "what is no build of this user; it stays",
    "dry_run": "of prune and clear: true if nothing was removed",
    "removed": "of prune and clear: the builds, as in info",
    "removed_size": "of prune and clear: their bytes",
}

_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tree = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = _output.add_action(tree, "cache", "info", "list the builds in the cache")
    prune = _output.add_action(
        tree,
        "cache",
        "prune",
        "remove damaged and stale builds, then old ones and those over a size limit",
    )
    prune.add_argument(
        "--older-than", type=_days, metavar="DAYS", help="also builds that are older than this"
    )
    prune.add_argument(
        "--max-size",
        type=_size,
        metavar="SIZE",
        help="then the oldest builds until the cache has this size: 2G",
    )
    clear = _output.add_action(tree, "cache", "clear", "remove all builds")
    clear.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    for sub in (prune, clear):
        sub.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    for sub in (info, prune, clear):
        _output.add_json(sub)


def run(args: argparse.Namespace) -> int:
    from precast._jit import cache

    found = cache.contents()
    rows = judged_builds(found)
    report: dict[str, object] = {
        "leftovers": [str(path) for path in found.leftovers],
        "foreign": [str(path) for path in found.foreign],
    }
    if args.action == "info":
        return _info(rows, found, report if args.json else None)
    doomed = rows if args.action == "clear" else _to_prune(rows, args.older_than, args.max_size)
    if args.action == "clear" and doomed and not args.dry_run and not args.yes:
        _confirm(len(doomed))
    if not args.dry_run:
        for folder in [*(row.entry.folder for row in doomed), *found.leftovers]:
            cache.remove(folder)
    size = sum(row.entry.size for row in doomed)
    if args.json:
        report["dry_run"] = args.dry_run
        report["removed"] = [_as_json(row) for row in doomed]
        report["removed_size"] = size
        _output.print_json(report)
        return 0
    _output.print_table([(row.entry.folder.name, row.state, row.reason) for row in doomed])
    verb = "would remove" if args.dry_run else "removed"
    print(f"{verb} {len(doomed)} of {len(rows)} builds, {_output.human_size(size)}")
    if found.leftovers:
        print(f"{verb} {len(found.leftovers)} folders that killed compiles have left")
    _print_foreign(found)
    return 0


def _info(rows: list[Build], found: Contents, report: dict[str, object] | None) -> int:
    from precast._jit.env import cache_dir

    size = sum(row.entry.size for row in rows)
    if report is not None:
        builds = [_as_json(row) for row in rows]
        _output.print_json(
            {"directory": str(cache_dir()), "size": size, "builds": builds, **report}
        )
        return 0
    print(f"{cache_dir()}: {len(rows)} builds, {_output.human_size(size)}")
    now = time.time()
    _output.print_table(
        [
            (
                row.entry.folder.name,
                row.entry.folder.parent.name,
                row.entry.folder.parents[1].name,
                _output.human_size(row.entry.size),
                _output.human_age(now - row.entry.modified),
                row.state,
                row.reason,
            )
            for row in rows
        ],
        ("build", "target", "CUDA", "size", "age", "state", ""),
    )
    if found.leftovers:
        print(f"{len(found.leftovers)} folders that killed compiles have left: precast cache prune")
    _print_foreign(found)
    return 0


def _print_foreign(found: Contents) -> None:
    for path in found.foreign:
        print(f"{_output.printable(path)} is no build of this user: left alone")


def _as_json(row: Build) -> dict[str, object]:
    from precast._jit import cache

    return {**cache.as_json(row.entry), "state": row.state, "reason": row.reason}


# -- pruning --------------------------------------------------------------------------------------


def _to_prune(rows: list[Build], days: float | None, max_size: int | None) -> list[Build]:
    now = time.time()
    doomed, kept = [], []
    for row in rows:
        age = now - row.entry.modified
        if row.state != "ok":
            doomed.append(row)
        elif days is not None and age > days * 86400:
            doomed.append(row._replace(reason=f"{_output.human_age(age)} old"))
        else:
            kept.append(row)
    if max_size is not None:
        left = sum(row.entry.size for row in kept)
        for row in sorted(kept, key=lambda row: row.entry.modified):
            if left <= max_size:
                break
            left -= row.entry.size
            doomed.append(row._replace(reason="over the size limit, oldest first"))
    return doomed


# -- arguments ------------------------------------------------------------------------------------


def _days(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return value


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.strip().lower())
    size = float("inf") if match is None else float(match[1]) * _SIZE_UNITS[match[2]]
    if math.isinf(size):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; legal: 500M, 2G or bytes")
    return int(size)


def _confirm(count: int) -> None:
    from precast._jit.env import cache_dir

    if not sys.stdin.isatty():
        raise UsageError(
            "standard input is no terminal, so nobody can confirm. Fix: precast cache clear --yes"
        )
    question = f"Remove all {count} builds of {cache_dir()}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    if input().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was removed")
