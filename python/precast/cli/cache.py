# SPDX-License-Identifier: Apache-2.0
"""Show, prune or clear the JIT cache of this user.

    precast cache info
    precast cache prune --older-than 30 --max-size 2G

info   what is in it, and whether this precast would still use it
prune  remove what is damaged or was built from other sources, then what is too old or too much
clear  remove everything
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from precast._base.progress import steps
from precast.cli import _output
from precast.cli._output import UsageError

if TYPE_CHECKING:
    from precast._jit.cache import Entry

EXIT_CODES = (0, 2, 3)
JSON = {
    "directory": "of info: the cache",
    "size": "of info: bytes in it",
    "builds": "of info: what is in it (folder, name, target, state: ok, stale or damaged, reason, "
    "...)",
    "dry_run": "of prune and clear: true if nothing was removed",
    "removed": "of prune and clear: the builds, as in info",
    "removed_size": "of prune and clear: their bytes",
}

_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


class Row(NamedTuple):
    """One build: ``ok``, ``stale`` or ``damaged``, and why."""

    entry: Entry
    state: str
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tree = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = _action(tree, "info", "show what is in the cache")
    prune = _action(tree, "prune", "remove what is damaged, stale, old or too much")
    prune.add_argument(
        "--older-than", type=_days, metavar="DAYS", help="also what was built before that"
    )
    prune.add_argument(
        "--max-size", type=_size, metavar="SIZE", help="then the oldest until this is left: 2G"
    )
    clear = _action(tree, "clear", "remove everything")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    for sub in (prune, clear):
        sub.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    for sub in (info, prune, clear):
        _output.add_json(sub)


def _action(
    tree: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    description = f"{text.capitalize()}.\n\n    precast cache {name}"
    return tree.add_parser(
        name,
        help=text,
        description=description,
        formatter_class=_output.HelpFormatter,
        allow_abbrev=False,
    )


def run(args: argparse.Namespace) -> int:
    rows = judged()
    if args.action == "info":
        return _info(rows, args.json)
    doomed = rows if args.action == "clear" else _to_prune(rows, args.older_than, args.max_size)
    if args.action == "clear" and doomed and not args.dry_run and not args.yes:
        _confirm(len(doomed))
    from precast._jit import cache

    if not args.dry_run:
        for row in doomed:
            cache.remove(row.entry.folder)
    size = sum(row.entry.size for row in doomed)
    if args.json:
        _output.print_json(
            {
                "dry_run": args.dry_run,
                "removed": [_as_json(row) for row in doomed],
                "removed_size": size,
            }
        )
        return 0
    _output.print_table([(row.entry.folder.name, row.state, row.reason) for row in doomed])
    verb = "would remove" if args.dry_run else "removed"
    print(f"{verb} {len(doomed)} of {len(rows)} builds, {_output.human_size(size)}")
    return 0


def _info(rows: list[Row], as_json: bool) -> int:
    from precast._jit.env import cache_dir

    size = sum(row.entry.size for row in rows)
    if as_json:
        _output.print_json(
            {"directory": str(cache_dir()), "size": size, "builds": [_as_json(r) for r in rows]}
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
    return 0


def _as_json(row: Row) -> dict[str, object]:
    from precast._jit import cache

    return {**cache.as_json(row.entry), "state": row.state, "reason": row.reason}


# -- judging --------------------------------------------------------------------------------------


def judged() -> list[Row]:
    """Every build in the cache, and whether this precast would use it."""
    from precast._jit import cache

    entries = list(cache.entries())
    rows = []
    with steps("checking the builds", len(entries)) as done:
        for entry in entries:
            rows.append(Row(entry, *_judge(entry)))
            done()
    return rows


def _judge(entry: Entry) -> tuple[str, str]:
    """``ok``, ``stale`` or ``damaged``, and why."""
    from precast._base.errors import ConfigError, UnsupportedConfigError
    from precast._base.trust import check_contents
    from precast._jit import cache
    from precast._plan.installed import plan

    meta = entry.meta
    if meta is None:
        return "damaged", f"{cache.META_NAME} cannot be read"
    library = entry.folder / f"{meta.name}.so"
    problem = check_contents(library, meta.size, meta.sha256, "precast cache prune")
    if problem is not None:
        return "damaged", problem
    op = meta.name.partition("__")[0]
    config = plan().config.ops.get(op)
    if config is None:
        return "ok", "a kernel of your own"
    axes: dict[str, str] = {}
    words = meta.name.split("__")[1:]
    for axis, word in zip(config.axes, words):
        axes[axis] = word.removeprefix(f"{axis}_")
    try:
        spec = plan().spec(op, axes, meta.arch, meta.cuda_major)
    except (ConfigError, UnsupportedConfigError, ValueError) as error:
        return "stale", f"this precast does not know it: {error}"
    if spec.name != meta.name or spec.fingerprint != meta.fingerprint:
        return "stale", "built from other sources or flags"
    return "ok", ""


def _to_prune(rows: list[Row], days: float | None, max_size: int | None) -> list[Row]:
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
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; legal: 500M, 2G or bytes")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def _confirm(count: int) -> None:
    from precast._jit.env import cache_dir

    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask. Fix: precast cache clear --yes")
    question = f"Remove all {count} builds of {cache_dir()}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    if input().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was removed")
