# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: tables on a terminal if rich is installed, aligned text, or JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: The format of every JSON object that a command prints; see the package's docstring.
JSON_SCHEMA = 1

#: Values that get a colour if they are a whole cell.
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


#: A terminal that leaves less than this to the last column gets every column with cells wider than
#: the first number on lines of its own.
_SHORT_CELL, _LAST_COLUMN = 20, 40


class UsageError(ValueError):
    """The command line is wrong; ``help_of`` is the command whose help explains it."""

    def __init__(self, message: str, help_of: str | None = None) -> None:
        super().__init__(message)
        self.help_of = help_of


class UnableError(RuntimeError):
    """This machine lacks what the command needs."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep the lines of docstrings, and leave room for option names beside their help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
        self._action_max_length = 16  # argparse ignores the indentation of subcommands.


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object and nothing else; that of an error holds error, fix and "
        "exit_code",
    )


#: The objects that this run has printed or begun to print: at most one.
_printed: list[Mapping[str, object]] = []


def print_json(data: Mapping[str, object]) -> None:
    """Print the object of a command, with the version of its format."""
    _printed.append(data)
    print(json.dumps(_of_unicode({"schema": JSON_SCHEMA, **data}), indent=2))


def has_printed_json() -> bool:
    """Whether this run has printed its object, or has begun to."""
    return bool(_printed)


def forget_json() -> None:
    """Begin a run, which prints an object of its own."""
    _printed.clear()


def _of_unicode(value: Any) -> Any:
    """Write what is no character as an escape: half a surrogate, which stands for a wrong byte.

    Strict readers of JSON reject it.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_of_unicode(key): _of_unicode(item) for key, item in value.items()}
    return list(map(_of_unicode, value)) if isinstance(value, (list, tuple)) else value


def printable(text: object) -> str:
    """``text`` without characters that rewrite a terminal or that its encoding lacks."""
    shown = "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode()
        for c in str(text)
    )
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def print_heading(text: str) -> None:
    text = printable(text)
    console = _console()
    if console is None:
        print(text)
    else:
        from rich.text import Text

        console.print(Text(text, style="bold"), soft_wrap=True)


def print_sections(sections: Mapping[str, Sequence[Sequence[object]]]) -> None:
    """Print rows under headings, with an empty line before each but the first."""
    for number, (title, rows) in enumerate(sections.items()):
        if number:
            print()
        print_heading(title)
        print_table(rows)


def print_table(
    rows: Iterable[Sequence[object]], header: Sequence[str] = (), indent: int = 2
) -> None:
    """Print rows in aligned columns; the last column may have any width."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        return
    console = _console()
    if console is None:
        _print_plain([list(header), *cells] if header else cells, indent)
        return
    widths = [max(map(len, column)) for column in zip(*cells)]
    last = len(widths) - 1
    if indent + sum(widths[:-1]) + 3 * last + min(widths[-1], _LAST_COLUMN) > console.width:
        _print_stacked(console, cells, header, widths, indent)
        return
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD if header else None,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1) if header else (0, 2, 0, 0),
        show_header=bool(header),
        header_style="bold",
    )
    for i in range(len(widths)):
        table.add_column(header[i] if header else "", no_wrap=i < last, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(Padding(table, (0, 0, 0, indent)))


def _print_stacked(
    console: Any, cells: list[list[str]], header: Sequence[str], widths: list[int], indent: int
) -> None:
    """Print short cells of a row on one line, and each wide one below it."""
    from rich.text import Text

    short = [i for i, width in enumerate(widths) if width <= _SHORT_CELL]
    room = [max(widths[i], len(header[i]) if header else 0) for i in short]
    for number, row in enumerate([list(header), *cells] if header else cells):
        is_head = bool(header) and number == 0
        line = Text("  ").join(
            Text(row[i].ljust(width), style="bold" if is_head else _STYLES.get(row[i], ""))
            for i, width in zip(short, room)
        )
        line.rstrip()
        lines = _fitted(line.plain, console.width - indent) if short else []
        if len(lines) == 1:
            console.print(Text(" " * indent) + line, soft_wrap=True)
        else:
            for text in lines:
                console.print(Text(" " * indent + text), soft_wrap=True)
        for i in (i for i in range(len(row)) if i not in short and row[i]):
            start = " " * _indentation(row[i], console.width, indent + 4 * bool(short))
            for text in _fitted(row[i], console.width - len(start)):
                style = "bold" if is_head else ""
                console.print(Text(start + text, style=style), soft_wrap=True)
        if is_head:
            console.print(Text("\u2500" * console.width), soft_wrap=True)


def _indentation(text: str, width: int, wanted: int) -> int:
    """Less than ``wanted``, so far as the longest word of ``text`` would be broken for it."""
    left = width - max(map(len, text.split()), default=0)
    return min(wanted, left) if left >= 0 else wanted


def _fitted(text: str, width: int) -> list[str]:
    """Lines of ``text``: broken at blanks, and longer words behind ``/`` and ``__`` if possible."""
    lines: list[str] = []
    for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        left = line
        while len(left) > width:
            ends = [match.end() for match in re.finditer(r"/|__", left[:width])]
            end = ends[-1] if ends else width
            lines.append(left[:end])
            left = left[end:]
        lines.append(left)
    return lines


def _print_plain(cells: list[list[str]], indent: int) -> None:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths))
        print((" " * indent + line).rstrip())


def _console() -> Any:
    """rich's console on a terminal if rich is installed, else None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def add_action(
    tree: argparse._SubParsersAction[argparse.ArgumentParser], command: str, name: str, text: str
) -> argparse.ArgumentParser:
    """Add one of the actions of a command that has several."""
    return tree.add_parser(
        name,
        help=text,
        description=f"{text.capitalize()}.\n\n    precast {command} {name}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )


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
