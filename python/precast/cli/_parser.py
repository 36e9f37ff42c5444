# SPDX-License-Identifier: Apache-2.0
"""The argparse tree of all commands, and its errors for a wrong command line."""

from __future__ import annotations

import argparse
import difflib
import importlib
import pkgutil
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import NoReturn

from precast._base.version import __version__
from precast.cli._output import JSON_SCHEMA, HelpFormatter, UsageError

#: Errors of the planner and of this package that name an unknown argument.
_UNKNOWN = re.compile(
    r"(?:(?:unknown [\w-]+|has no axis) '([^']+)'|\w+=(\S+) is not supported); legal: (.*)"
)
#: A combination of values outside a joint axis.
_COMBINATION = re.compile(r"([\w,]+)=(\S+) is not supported; legal: (.*)")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are raised, so that one place prints them."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, help_of=self.prog)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as the base class does; a leftover argument is an error of the command itself."""
        found, extra = super().parse_known_args(args, namespace)
        if extra and extra[0].startswith("-"):
            legal = ", ".join(option for option in self._option_string_actions)
            self.error(f"unknown option {extra[0].partition('=')[0]!r}; legal: {legal}")
        elif extra:
            self.error(f"unexpected argument {extra[0]!r}")
        return found, extra

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is None or value in action.choices:
            return
        legal = ", ".join(map(str, action.choices))
        if action.option_strings:
            text = f"unknown value {value!r}; legal: {legal}"
            raise argparse.ArgumentError(action, text)
        what = str(action.metavar or action.dest).lower()
        raise argparse.ArgumentError(None, f"unknown {what} {value!r}; legal: {legal}")


#: Of every command. Not in a docstring, which ``python -OO`` removes.
EXIT_CODES = {
    0: "done; every check passed",
    1: "a check failed: something would have to be compiled, is missing, or is damaged",
    2: "the command line, an environment variable or a configuration file is wrong",
    3: "the machine cannot do it: no compiler, no disk space, a failed download",
    70: "a bug in precast",
    130: "interrupted",
    141: "the output pipe was closed before the command ended",
}


def command_names() -> list[str]:
    """The commands, found in the folder of this package."""
    package = importlib.import_module(__package__)
    found = (info.name for info in pkgutil.iter_modules(package.__path__))
    return [name.replace("_", "-") for name in found if not name.startswith("_")]


def command_module(command: str) -> ModuleType:
    """The module that is a command."""
    return importlib.import_module(f"{__package__}.{command.replace('-', '_')}")


def build_parser(only: Iterable[str] | None = None) -> Parser:
    """Build the tree of all commands, or of some; each costs the import of its module."""
    parser = Parser(
        prog="precast",
        description="Prebuilt CUDA kernels: list, check, build and install them.",
        epilog="exit codes:\n" + _rows(EXIT_CODES),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"precast {__version__}")
    tree = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in command_names() if only is None else only:
        module = command_module(name)
        text = (module.__doc__ or "").strip()
        sub = tree.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            epilog=_epilog(module),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def _epilog(module: ModuleType) -> str:
    parts = []
    keys: Mapping[str, str] | None = getattr(module, "JSON", None)
    if keys:
        rows = {"schema": f"{JSON_SCHEMA}, the version of this format", **keys}
        parts.append("keys of the JSON object:\n" + _rows(rows))
    codes: Sequence[int] | None = getattr(module, "EXIT_CODES", None)
    if codes:
        parts.append("exit codes:\n" + _rows({code: EXIT_CODES[code] for code in codes}))
    return "\n\n".join(parts)


def _rows(rows: Mapping[str, str] | Mapping[int, str]) -> str:
    width = max(len(str(key)) for key in rows) + 2
    return "\n".join(
        textwrap.fill(
            text,
            98,
            initial_indent=f"  {key!s:<{width}}",
            subsequent_indent=" " * (width + 2),
            break_long_words=False,
        )
        for key, text in rows.items()
    )


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read a command line; only the command that it names is imported.

    Raises
    ------
    UsageError
        If it is wrong.
    SystemExit
        After ``--help`` and ``--version``.
    """
    named = words[0] if words else None
    only = [] if named == "--version" else [named] if named in command_names() else None
    return build_parser(only).parse_args(words)


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line has the option ``--json``, even if it cannot be parsed."""
    end = words.index("--") if "--" in words else len(words)
    return "--json" in words[:end]


def corrected(text: str, words: Sequence[str]) -> str | None:
    """The same command line with the unknown argument replaced by the nearest legal one."""
    joint = _COMBINATION.search(text)
    if joint is not None and "," in joint[1]:
        keys, got = joint[1].split(","), joint[2]
        near = difflib.get_close_matches(got, joint[3].split(" or "), 1, 0.5)
        if not near:
            return None
        right = {
            f"{k}={old}": f"{k}={new}"
            for k, old, new in zip(keys, got.split(","), near[0].split(","))
        }
        return shlex.join(["precast", *(right.get(word, word) for word in words)])
    match = _UNKNOWN.search(text)
    if match is None:
        return None
    word = match[1] or match[2]
    legal = re.split(r",? or a function: |[,:] ", match[3])
    near = difflib.get_close_matches(word, legal, 1, 0.5)
    if not near:
        return None
    fixed = [re.sub(rf"(^|=){re.escape(word)}(?==|$)", rf"\g<1>{near[0]}", w) for w in words]
    return None if fixed == list(words) else shlex.join(["precast", *fixed])
