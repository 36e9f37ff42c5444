# SPDX-License-Identifier: Apache-2.0
"""The reference of the command line, generated from the argparse tree."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from unittest import mock

from precast.cli import _main, _parser
from sitegen import markup, rst

_NO_COLOUR = {"COLUMNS": "80", "NO_COLOR": "1"}


def reference() -> str:
    """A section for each command, its arguments in a table."""
    with mock.patch.dict(os.environ, _NO_COLOUR):
        commands = _subparsers(_main.build_parser())
        return "\n".join(_section(name, parser) for name, parser in commands)


def exit_codes() -> str:
    """The table of exit codes."""
    rows = [(f"`{code}`", words) for code, words in _parser.EXIT_CODES.items()]
    return markup.table(("Code", "Meaning"), rows)


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    parts = [f"## precast {name} {{ #{name} }}\n"]
    if parser.description:
        parts.append(markup.text(rst.markdown(parser.description)) + "\n")
    parts.append(_usage(parser))
    parts += [_arguments(parser)]
    for action, sub in _subparsers(parser):
        parts.append(f"### precast {name} {action} {{ #{name}-{action} }}\n")
        said = sub.description or _summary(parser, action)
        parts += [markup.text(f"{said[:1].upper()}{said[1:]}".rstrip(".")) + ".\n" if said else ""]
        parts += [_usage(sub), _arguments(sub)]
    if parser.epilog:
        parts.append(markup.fence("text", parser.epilog))
    return "\n".join(part for part in parts if part)


def _usage(parser: argparse.ArgumentParser) -> str:
    return markup.fence("text", parser.format_usage().removeprefix("usage: "))


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        if action.help == argparse.SUPPRESS:
            continue
        value = _value(action)
        if action.option_strings:
            name = ", ".join(action.option_strings) + (f" {value}" if value else "")
        else:
            name = value
        help_text = (action.help or "") % {**vars(action), "prog": parser.prog}
        required = "**required**; " if action.required and action.option_strings else ""
        rows.append((f"`{name}`", required + markup.text(help_text)))
    return markup.table(("Argument", "Meaning"), rows) if rows else ""


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _subparsers(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _summary(parser: argparse.ArgumentParser, name: str) -> str:
    """The help text of a sub-command in the list of its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                if choice.dest == name:
                    return choice.help or ""
    return ""
