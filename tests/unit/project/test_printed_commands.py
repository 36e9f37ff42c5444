# SPDX-License-Identifier: Apache-2.0
"""The commands and the names of wheels in messages, texts and scripts are ones that exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from precast._base.names import provider_extra
from precast._plan.installed import plan
from precast.cli import _parser

ROOT = Path(__file__).resolve().parents[3]
PLACES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "docker/*", "ci/*.sh")
PLACES += ("ci/*.py", "python/precast/**/*.py", ".github/workflows/*")
TEXTS = sorted(path for place in PLACES for path in ROOT.glob(place) if path.is_file())
#: A command of precast with what follows on its line, up to the end of its text.
COMMAND = re.compile(r"(?<![\w./-])precast ([a-z]+(?:-[a-z]+)?)((?: [^`\"'#;,()\n]*)?)")
#: What follows the name of a project or of an extra that holds the modules of one target.
TARGET = re.compile(r"precast(?:[-_]jit[-_]cache[-_]|\[)(cu[\w,-]*)")
EXTRAS = {provider_extra(major, arch) for major in plan().build.cuda for arch in plan().build.archs}


def options(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a command and of its actions."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {o for sub in action.choices.values() for o in options(sub)}
    return found


def unknown(text: str) -> list[str]:
    """Options that a command in a text does not have."""
    commands = _parser.build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    return [
        f"precast {name} {option}"
        for name, rest in COMMAND.findall(text)
        if name in commands
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)
        if option not in options(commands[name])
    ]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in TEXTS}


def test_options_of_commands_exist(texts):
    # One parser for all texts; a line that goes on is one command.
    whole = "\n".join(texts.values()).replace("\\\n", " ")
    assert unknown(whole) == []
    assert len(COMMAND.findall(whole)) > 100


def test_an_option_that_does_not_exist_is_found():
    text = "Fix: precast install --find-link DIR, or `precast cache prune --dry-run --all`"
    assert unknown(text) == ["precast install --find-link", "precast cache --all"]


def test_names_of_wheels_follow_one_scheme(texts):
    wrong = {}
    found = set()
    for name, text in texts.items():
        for words in TARGET.findall(text):
            for word in filter(None, words.split(",")):
                extra = word.replace("_", "-").rstrip("-")
                found.add(extra)
                if extra not in EXTRAS and extra != "cu":  # an expression follows
                    wrong[name] = word
    assert wrong == {}
    assert found & EXTRAS
