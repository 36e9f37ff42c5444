# SPDX-License-Identifier: Apache-2.0
"""precast's functions take what FlashInfer's take, or the difference is listed with its reason.

``ci/flashinfer_api.py`` writes FlashInfer's signatures, ``flashinfer.json``; ``differences.toml``
says where precast's differ, and why.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from enum import Enum
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest

from precast.shim import ENGINES, MODULES, look_up, of_precast
from precast.shim.overlay import ops

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
THEIRS = json.loads((HERE / "flashinfer.json").read_text())
DIFFERENCES = tomllib.loads((HERE / "differences.toml").read_text())["difference"]
_KINDS = {
    Parameter.POSITIONAL_ONLY: "positional",
    Parameter.POSITIONAL_OR_KEYWORD: "any",
    Parameter.KEYWORD_ONLY: "keyword",
}


def ours(name: str) -> Any:
    """precast's object of a name, or None."""
    module, _, attribute = name.rpartition(".")
    try:
        return look_up(module, attribute, "vllm")
    except AttributeError:
        return None


def shared() -> Iterator[tuple[str, Any, str]]:
    """The functions and methods that both have: name, precast's, FlashInfer's parameters."""
    for name, theirs in THEIRS["names"].items():
        value = ours(name)
        if value is None or (isinstance(theirs, str) and theirs.startswith("= ")):
            continue
        if isinstance(theirs, str):
            yield name, value, theirs
            continue
        for method, parameters in theirs.items():
            if getattr(value, method, None) not in (None, getattr(object, method, None)):
                yield f"{name}.{method}", getattr(value, method), parameters


SHARED = {name: (value, theirs) for name, value, theirs in shared()}


def parameters(text: str) -> dict[str, tuple[str, str | None]]:
    """Kind and default of each parameter in FlashInfer's text."""
    (function,) = ast.parse(f"def f({text}): pass").body
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    values: list[ast.expr | None] = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
    rows = {a.arg: ("any", v and ast.unparse(v)) for a, v in zip(plain, values)}
    for a in args.posonlyargs:
        rows[a.arg] = ("positional", rows[a.arg][1])
    for a, v in zip(args.kwonlyargs, args.kw_defaults):
        rows[a.arg] = ("keyword", v and ast.unparse(v))
    return rows


def same_default(value: Any, text: str) -> bool:
    """Whether a default is the one of a text of FlashInfer's source."""
    try:
        return bool(ast.literal_eval(text) == value)
    except ValueError:
        pass
    if isinstance(value, Enum):
        value = value.name
    return str(getattr(value, "__name__", value)).rpartition(".")[2] == text.rpartition(".")[2]


def differences(function: Any, text: str) -> Iterator[str]:
    """How a function of precast takes less than FlashInfer's, or takes it otherwise."""
    own, theirs = inspect.signature(function).parameters, parameters(text)
    rest = {p.kind for p in own.values()}
    if [*own] == ["args", "kwargs"]:
        return
    places = [name for name, p in own.items() if p.kind is not Parameter.KEYWORD_ONLY]
    positional = [name for name, (kind, _) in theirs.items() if kind != "keyword"]
    for name, (kind, default) in theirs.items():
        parameter = own.get(name)
        if parameter is None:
            if Parameter.VAR_KEYWORD not in rest:
                yield f"no {name}"
            continue
        if kind == "any" and _KINDS.get(parameter.kind) != "any":
            yield f"{name} is {_KINDS[parameter.kind]}"
        elif kind != "keyword" and places.index(name) != positional.index(name):
            yield f"{name} is at another place"
        if default is None and parameter.default is not Parameter.empty:
            continue  # More is legal.
        if default is None or parameter.default is Parameter.empty:
            if default is not None:
                yield f"{name} has no default"
        elif not same_default(parameter.default, default):
            yield f"{name}={parameter.default}, not {default}"
    for name, parameter in own.items():
        variable = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if name not in theirs and not variable and parameter.default is Parameter.empty:
            yield f"needs {name}"


def test_the_facts_are_of_the_version_that_the_shim_has():
    assert THEIRS["version"] == ENGINES["vllm"]
    assert len(SHARED) > 100


@pytest.mark.parametrize("name", SHARED)
def test_a_signature_takes_what_that_of_flashinfer_takes(name):
    listed = [row["what"] for row in DIFFERENCES if row["name"] == name]
    assert sorted(differences(*SHARED[name])) == sorted(listed)


def test_every_difference_is_of_a_name_that_both_have():
    assert {row["name"] for row in DIFFERENCES} <= {*SHARED}
    assert all(row["reason"] for row in DIFFERENCES)


@pytest.mark.parametrize(
    ("function", "theirs", "found"),
    [
        (lambda a, b=1: 0, "a, b=1", []),
        (lambda a, c=2, b=1: 0, "a, b=1", ["b is at another place"]),
        (lambda a, b=1, *, c=2: 0, "a, b=1", []),
        (lambda a, *, b=1: 0, "a, b=1", ["b is keyword"]),
        (lambda a, b=1: 0, "a, *, b=1", []),
        (lambda a: 0, "a, b=1", ["no b"]),
        (lambda a, b=2: 0, "a, b=1", ["b=2, not 1"]),
        (lambda a, b: 0, "a, b=1", ["b has no default"]),
        (lambda a, b=1: 0, "a, b", []),
        (lambda a, b, c: 0, "a, b", ["needs c"]),
        (lambda a, **options: 0, "a, b=1", []),
        (lambda *args, **options: 0, "a, /, b", []),
    ],
)
def test_what_counts_as_a_difference(function, theirs, found):
    assert [*differences(function, theirs)] == found


def test_defaults_by_name():
    import torch

    from precast.quantization import SfLayout

    assert same_default(torch.bfloat16, "torch.bfloat16")
    assert same_default(SfLayout.layout_128x4, "SfLayout.layout_128x4")
    assert not same_default(SfLayout.layout_linear, "SfLayout.layout_128x4")
    assert same_default(max, "max") and not same_default(min, "max")
    assert not same_default(None, "torch.bfloat16")


def test_every_module_with_ops_is_in_the_facts():
    """Run ``ci/flashinfer_api.py`` again when the shim serves a new module."""
    there = {name.rpartition(".")[0] for name in THEIRS["names"]}
    known = {MODULES[path] for path in there if path in MODULES}
    missing = [path for path in of_precast() if MODULES[path] not in known and ops(path)]
    assert not missing
