# SPDX-License-Identifier: Apache-2.0
"""Values that the shell offers after TAB. argcomplete asks for them once it is set up."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from precast.cli._output import UnableError, UsageError

SHELLS = ("bash", "zsh", "fish")

Completer = Callable[..., Iterable[str]]


def attach(action: argparse.Action, completer: Completer) -> None:
    """Let argcomplete ask ``completer`` for the values of an argument."""
    setattr(action, "completer", completer)  # noqa: B010 - argparse does not declare it


def script(shell: str) -> str:
    """The script that makes a shell complete ``precast``.

    Raises
    ------
    UnableError
        If argcomplete is not installed.
    """
    return str(_argcomplete().shellcode(["precast"], shell=shell))


def answer(parser: argparse.ArgumentParser) -> NoReturn:
    """Answer the shell's question, which is in the environment."""
    _argcomplete().autocomplete(parser)
    raise SystemExit(1)  # There was no question, or autocomplete() would have ended the process.


def _argcomplete() -> Any:
    try:
        import argcomplete
    except ImportError:
        raise UnableError('completion needs argcomplete. Fix: pip install "precast[cli]"') from None
    return argcomplete


# -- values ---------------------------------------------------------------------------------------


def profiles(**_: object) -> Sequence[str]:
    from precast._plan.installed import plan

    return list(plan().build.profiles)


def ops(**_: object) -> Sequence[str]:
    from precast._runtime.loader import loader

    return list(loader.document["ops"])


def ops_and_functions(**_: object) -> Sequence[str]:
    from precast.cli._names import functions

    return list(dict.fromkeys([*ops(), *functions()]))


def axes(parsed_args: argparse.Namespace, **_: object) -> Sequence[str]:
    """``KEY=VALUE`` of the op in the command line that fit the ones that the line has already."""
    from precast._base.names import axis_word
    from precast._plan.installed import plan
    from precast.cli._names import ops_of

    word = getattr(parsed_args, "op", None)
    given = dict(
        text.split("=", 1) for text in getattr(parsed_args, "axes", None) or () if "=" in text
    )
    try:
        main = ops_of(str(word))[:1]
    except UsageError:
        main = []
    return [
        f"{axis}={axis_word(value)}"
        for op in map(plan().config.op, main)
        for axis in op.axes
        if axis not in given
        for value in op.space.offered(axis, given)
    ]


def capabilities(**_: object) -> Sequence[str]:
    from precast._runtime.loader import loader

    return [c for row in loader.document["archs"].values() for c in row["serves"]]


def targets(**_: object) -> Sequence[str]:
    from precast._runtime.loader import loader

    return [row["target"] for row in loader.document["archs"].values()]


def cuda_majors(**_: object) -> Sequence[str]:
    from precast._runtime.loader import loader

    return list(loader.document["cuda"])
