# SPDX-License-Identifier: Apache-2.0
"""Command lines and environment variables full of junk: a documented exit code, never a bug.

The commands run in this process, which makes thousands of them possible in seconds. No process can
be started, so that no sweep installs, downloads or compiles anything.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from cli_support import core_specs, run, write_provider

from precast._base import env as _env
from precast._runtime.loader import loader
from precast.cli import _main, _parser

LINES_PER_COMMAND = 100
#: Those that are accepted take a tenth of a second.
FEWER = {("list",): 20, ("verify",): 40}
VALUES_PER_VARIABLE = 8
SEED = 20

#: What no option takes, what one of them takes, and what is nearly right. No absolute path that
#: could be written to.
WORDS = [
    *("", " ", "-", "--", "---", "-x", "--json=1", "--help=", "=", "==", "a=b=c", "@file", "\n"),
    *("\t\x1b[2J", "\x07", "é", "\u202e", "\udcff", "%s %(prog)s", "{}", "{0}", "$(exit)", "`a`"),
    *("'", '"', "*", "[", "?", "a" * 5000, "../x", "a/b", ".", "file", "/dev/null", "/proc/self"),
    *("0", "1", "-1", "1.5", "1e9", "nan", "inf", "-inf", "0x10", "1_0", "٣", "9" * 5000),
    *(str(2**31), str(2**63), str(2**64), "1K", "2G", "-2G", "G", "1.5.2", "9.0", "9.0a", "sm90a"),
    *("99.9", "9", "9.0 8.0", "8.0,9.0", "12", "13", "cu13", "core", "ci", "croe", "full", "norm"),
    *("nrom", "rmsnorm", "dtype=bf16", "dtype=", "dtype", "=bf16", "dtype=bf16,f16", "bf16"),
    *("head_dim_qk=64", "head_dim_qk=9" + "9" * 5000, "cpu", "cuda", "cuda:0", "cuda:9999999999"),
    *("meta", "junk:0", "jit", "torch", "torch==", "torch>=2; ", "prebuilt", "JIT", "bash", "tcsh"),
    *("os", "a..b", "..", "None", "True", "[]", "[" * 5000, "info", "prune", "clear", "3.11", "3"),
    *("manylinux_2_28_x86_64", "linux_x86_64", "any", "win_amd64", "manylinux_2_28", "_"),
]
#: Words that make a run harmless.
ALWAYS = {("build",): ["--dry-run"], ("bundle",): ["--no-index"]}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


#: Command lines that once ended with 70.
FOUND = (["cache", "prune", "--max-size", "9" * 400], ["cache", "prune", "--max-size", "9" * 5000])

#: Values of environment variables, which are bytes other than NUL.
VALUES = [
    *(" ", "-", "0", "1", "-1", "3", "10", "1e999", "nan", "inf", "9" * 5000, "²", "٣", "true"),
    *("auto", "JUNK", "\udcff", "\n", "\x1b[2J", "%s%n", "$(exit)", "a" * 5000, "../x", "a:b::c"),
    *(":", "file", "/dev/null", "/proc/self", "/proc/1/root", "norm,*[", "core", "13", "8.0 junk"),
]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[Sequence[str]], Outcome]:
    """Run a command line in this process, in a folder of its own, where no process starts."""
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "file").write_text("junk")
    write_provider(tmp_path / "good", core_specs("sm90a"))
    monkeypatch.setenv("PRECAST_PROVIDER_PATH", str(tmp_path / "good"))
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def start(self: object, args: Any, *rest: object, **options: object) -> NoReturn:
        raise FileNotFoundError(2, os.strerror(2), str(args if isinstance(args, str) else args[0]))

    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda self: None)
    loader.bind()

    def run_here(words: Sequence[str]) -> Outcome:
        try:
            code = _main.main(words)
        except SystemExit as end:  # --help and --version
            code = 0 if end.code is None else int(end.code)
        return Outcome(code, *capfd.readouterr())

    yield run_here
    monkeypatch.undo()
    loader.bind()


def commands() -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command with its parser, those below a command, too."""

    def below(name: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[Any]:
        trees = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not trees:
            yield name, parser
        for tree in trees:
            for word, sub in tree.choices.items():
                yield from below((*name, word), sub)

    yield from below((), _parser.build_parser())


COMMANDS = dict(commands())


def lines(name: tuple[str, ...], rng: random.Random) -> Iterator[list[str]]:
    """Random options of a command with random values, and random words."""
    options = [a for a in COMMANDS[name]._actions if a.option_strings]
    for _ in range(FEWER.get(name, LINES_PER_COMMAND)):
        words: list[str] = []
        for action in rng.sample(options, rng.randint(0, min(3, len(options)))):
            words.append(rng.choice(action.option_strings))
            if action.nargs != 0:
                words += rng.choices(WORDS, k=rng.choice((0, 1, 1, 1, 2)))
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            words.insert(rng.randint(0, len(words)), rng.choice(WORDS))
        if rng.random() < 0.5 and any("--json" in a.option_strings for a in options):
            words.insert(0, "--json")
        yield [*name, *ALWAYS.get(name, ()), *words]


def check(words: Sequence[str], outcome: Outcome) -> None:
    """Hold what the documentation promises of every command line."""
    code, out, err = outcome
    shown = f"{[word[:60] for word in words]}: {code}\n{out[-500:]}\n{err[-3000:]}"
    documented = _parser.command_module(words[0]).EXIT_CODES
    assert code in documented, shown
    assert "Traceback" not in err, shown
    if code in (2, 3):
        assert "error: " in err, shown
        assert "Fix: " in err, shown
    if "--json" in words and code in (0, 1) and not out.startswith("usage: "):
        assert json.loads(out, parse_constant=pytest.fail)["schema"] == 1, shown


def test_the_sweep_knows_every_command():
    assert {name[0] for name in COMMANDS} == set(_parser.command_names())
    assert ("cache", "prune") in COMMANDS


@pytest.mark.parametrize("name", COMMANDS, ids="-".join)
def test_command_lines_of_junk(name: tuple[str, ...], call: Callable[..., Outcome]) -> None:
    codes = set()
    for words in lines(name, random.Random(SEED)):
        outcome = call(words)
        check(words, outcome)
        codes.add(outcome.code)
    assert len(codes) > 1


@pytest.mark.parametrize("words", FOUND, ids=range(len(FOUND)))
def test_lines_that_were_a_bug(words: list[str], call: Callable[..., Outcome]) -> None:
    outcome = call(words)
    check(words, outcome)
    assert outcome.code == 2


#: Commands that only look.
LOOKING = (["doctor"], ["explain", "norm", "dtype=bf16", "--arch", "9.0"], ["cache", "info"])


@pytest.mark.parametrize("variable", [row.name for row in _env.REGISTRY])
def test_variables_of_junk(
    variable: str, call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in random.Random(f"{SEED}{variable}").sample(VALUES, VALUES_PER_VARIABLE):
        monkeypatch.setenv(variable, value)
        loader.bind()
        for words in LOOKING:
            words = [*words, "--json"]
            try:
                check(words, call(words))
            except AssertionError as error:
                raise AssertionError(f"{variable}={value[:60]!r}") from error


def test_variables_that_the_import_reads() -> None:
    """All of them are junk at once, in a process that has imported nothing."""
    names = [row.name for row in _env.REGISTRY]
    for value in ("junk", "9" * 5000, os.fsdecode(b"\xff")):
        done = run("list", "--json", **dict.fromkeys(names, value))
        assert done.returncode in (2, 3), done.stderr  # 3: a path that is too long
        assert "Traceback" not in done.stderr
        # The line before it is what Python's start says of PRECAST_AS_FLASHINFER.
        assert re.search(r"^error: .*\n(.*\n)*Fix: ", done.stderr, re.MULTILINE)
