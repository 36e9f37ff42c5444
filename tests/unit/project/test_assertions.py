# SPDX-License-Identifier: Apache-2.0
"""Every test asserts something: that a call raises nothing shows little."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).resolve().parents[2]
#: Names of pytest and of torch that assert.
ASSERTING = {"raises", "warns", "fail", "assert_close"}


class Function(NamedTuple):
    """A function of a test file: ``check``, or ``.check`` for a method and what lies in another."""

    name: str
    asserts: bool
    calls: frozenset[str]  # ``check`` for check(...), ``.check`` for case.check(...)


def functions_of(tree: ast.Module) -> list[Function]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [_function(node, "" if node in tree.body else ".") for node in found]


def _function(function: ast.FunctionDef, prefix: str) -> Function:
    asserts, calls = False, set()
    for node in ast.walk(function):
        asserts |= isinstance(node, ast.Assert)
        if isinstance(node, ast.Raise):
            asserts |= "AssertionError" in ast.dump(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            calls.add(node.func.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asserts |= node.func.attr in ASSERTING
            calls.add(f".{node.func.attr}")
    return Function(
        f"{prefix}{function.name}", asserts or bool(calls & ASSERTING), frozenset(calls)
    )


def imports_of(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """What a file imports by name: its own name, the module's last part, the name there."""
    return {
        name.asname or name.name: ((node.module or "").rpartition(".")[2], name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }


def silent_tests(sources: dict[str, str]) -> list[str]:
    """Tests that assert nothing, neither themselves nor by a helper; ``sources`` are texts by stem.

    A method is known by its name alone, so some silent test may be missed, and none is accused.
    """
    trees = {stem: ast.parse(text) for stem, text in sources.items()}
    functions = {stem: functions_of(tree) for stem, tree in trees.items()}
    imports = {stem: imports_of(tree) for stem, tree in trees.items()}
    known = {stem: {f.name for f in found if f.asserts} for stem, found in functions.items()}
    before = None
    while before != known:
        before = {stem: set(names) for stem, names in known.items()}
        methods = {name for names in known.values() for name in names if name.startswith(".")}
        for stem, names in known.items():
            taken = imports[stem].items()
            names |= {name for name, (module, real) in taken if real in known.get(module, ())}
            names |= {f.name for f in functions[stem] if f.calls & (names | methods)}
    return [
        f"{stem}: {function.name}"
        for stem, found in functions.items()
        for function in found
        if function.name.startswith("test_") and function.name not in known[stem]
    ]


def test_every_test_asserts_something() -> None:
    sources = {path.stem: path.read_text("utf-8") for path in TESTS.rglob("*.py")}
    assert len(sources) > 100
    assert silent_tests(sources) == []


@pytest.mark.parametrize(
    ("body", "silent"),
    [
        ("run(1)", True),
        ("other(1)", True),
        ("assert run(1) == 2", False),
        ("with pytest.raises(ValueError):\n        run(1)", False),
        ("check(1)", False),
        ("wrapped(1)", False),
        ("case.method(1)", False),
    ],
)
def test_a_silent_test_is_found(body: str, silent: bool) -> None:
    helpers = """
def other(x): ...
def check(x):
    assert x
def wrapped(x):
    check(x)
class Case:
    def method(self, x):
        wrapped(x)
"""
    source = f"from helpers import check, other, wrapped\ndef test_it():\n    {body}\n"
    found = silent_tests({"helpers": helpers, "test_a": source})
    assert found == (["test_a: test_it"] if silent else [])
