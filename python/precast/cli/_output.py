# SPDX-License-Identifier: Apache-2.0
"""What the commands print: aligned text, coloured where rich is installed, or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

#: Words that get a colour where they are a whole cell.
_STYLES = {
    "ok": "green",
    "accepted": "green",
    "prebuilt": "green",
    "cached": "cyan",
    "JIT": "yellow",
    "rejected": "yellow",
    "stale": "yellow",
    "missing": "red",
    "damaged": "red",
    "problem": "red",
}


class UsageError(ValueError):
    """The command line asks for something that has no meaning."""


class UnableError(RuntimeError):
    """This machine lacks what the command needs."""


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document for machines")


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2))


def print_heading(text: str) -> None:
    console = _console()
    if console is None:
        print(text)
    else:
        from rich.text import Text

        console.print(Text(text, style="bold"))


def print_table(
    rows: Iterable[Sequence[object]], header: Sequence[str] = (), indent: int = 2
) -> None:
    """Rows in aligned columns; the last column may be as long as it likes."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not cells:
        return
    console = _console()
    if console is None:
        _print_plain([list(header), *cells] if header else cells, indent)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(header), header_style="dim"
    )
    for i in range(len(cells[0])):
        last = i == len(cells[0]) - 1
        table.add_column(header[i] if header else "", no_wrap=not last, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    from rich.padding import Padding

    console.print(Padding(table, (0, 0, 0, indent)))


def _print_plain(cells: list[list[str]], indent: int) -> None:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths))
        print((" " * indent + line).rstrip())


def _console() -> Any:
    """rich's console on a terminal where rich is installed, else None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def human_size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def human_age(seconds: float) -> str:
    for limit, unit in ((60, "s"), (60, "min"), (24, "h")):
        if seconds < limit:
            return f"{max(0, seconds):.0f} {unit}"
        seconds /= limit
    return f"{seconds:.0f} days"
