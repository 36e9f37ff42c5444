# SPDX-License-Identifier: Apache-2.0
"""What engines ask of FlashInfer is in the package, or in the list of what is absent.

``ci/engine_contract.py`` writes the facts, ``engines.json``; ``absent.toml`` says what is missing,
and why.
"""

from __future__ import annotations

import fnmatch
import inspect
import json
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from precast.shim import ENGINES, look_up, modules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
FACTS = json.loads((HERE / "engines.json").read_text())
ABSENT = tomllib.loads((HERE / "absent.toml").read_text())

#: The files that every process of an engine imports on a GPU of capability 8.0 to 12.1.
START = {
    "vllm": {"vllm/v1/attention/backends/flashinfer.py"},
    "sglang": {
        "sglang/srt/layers/attention/flashinfer_backend.py",
        "sglang/srt/layers/moe/token_dispatcher/flashinfer_utils.py",
        "sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_mxint4_moe.py",
        "sglang/srt/layers/quantization/fp8_utils.py",
        "sglang/srt/layers/quantization/mxfp4.py",
    },
}


def kind(version: str) -> str:
    """``vllm`` of ``vllm 0.33.0``."""
    return version.partition(" ")[0]


def find(version: str, name: str) -> Any:
    """The object behind a name; AttributeError if it is missing."""
    module, _, attribute = name.rpartition(".")
    if module not in modules(kind(version)):
        raise AttributeError(f"no module flashinfer.{module}")
    return look_up(module, attribute, kind(version))


def is_there(version: str, name: str) -> bool:
    try:
        find(version, name)
    except AttributeError:
        return False
    return True


def asked(version: str) -> dict[str, Any]:
    """The facts of a version, without what every module has, ``__file__`` and ``__version__``."""
    names = FACTS[version]["names"]
    return {name: fact for name, fact in names.items() if not name.startswith("__")}


def families(version: str, name: str) -> list[str]:
    """The families of ``absent.toml`` that a name belongs to."""
    return [
        family["name"]
        for family in ABSENT["family"]
        if kind(version) in family.get("engines", ENGINES)
        and name not in family.get("except", ())
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in family["names"])
    ]


def misfits(version: str, name: str) -> Iterator[tuple[str, list[Any], str]]:
    """Attributes that a name lacks and calls that it does not accept: what, the call, the error."""
    fact, target = FACTS[version]["names"][name], find(version, name)
    yield from calls_misfit(name, target, fact.get("calls", []), 0)
    for kind_of_member, own in (("members", 0), ("methods", 1)):
        for member, calls in fact.get(kind_of_member, {}).items():
            try:
                value = attrgetter(member)(target)
            except AttributeError as error:
                yield f"{name}.{member}", [], str(error)
            else:
                yield from calls_misfit(f"{name}.{member}", value, calls, own)


def calls_misfit(
    name: str, target: Any, calls: list[list[Any]], own: int
) -> Iterator[tuple[str, list[Any], str]]:
    """The calls that a function does not accept, with ``own`` arguments in front."""
    for call in calls:
        count, *words = call
        signature = inspect.signature(target)
        bind = signature.bind_partial if "*" in words else signature.bind
        try:
            bind(*[None] * (own + count), **{word: None for word in words if word != "*"})
        except TypeError as error:
            yield name, call, str(error)


@pytest.mark.parametrize("version", FACTS)
def test_a_name_is_there_or_is_absent_for_one_reason(version):
    wrong = []
    for name in asked(version):
        absent = families(version, name)
        if is_there(version, name) and absent:
            wrong.append(f"{name} is there, and in absent.toml: {absent}")
        if not is_there(version, name) and len(absent) != 1:
            wrong.append(f"{name} is missing, and {absent or 'not'} in absent.toml")
    assert not wrong, "\n".join(wrong)


def test_every_line_of_the_absent_is_needed():
    every = [(version, name) for version in FACTS for name in asked(version)]
    for family in ABSENT["family"]:
        for pattern in family["names"]:
            inside = [n for v, n in every if fnmatch.fnmatchcase(n, pattern)]
            assert inside, f"{family['name']}: no engine asks for {pattern}"
        for name in family.get("except", ()):
            assert any(is_there(v, n) for v, n in every if n == name), f"{name} is missing"
        assert family["reason"]


@pytest.mark.parametrize("version", FACTS)
def test_calls_of_engines_fit_the_signatures(version):
    wrong = []
    for name in filter(lambda name: is_there(version, name), asked(version)):
        for what, call, error in misfits(version, name):
            if not any(excuses(row, version, what, call) for row in ABSENT["misfit"]):
                wrong.append(f"{what}{call}: {error}")
    assert not wrong, "\n".join(wrong)


def excuses(row: dict[str, Any], version: str, what: str, call: list[Any]) -> bool:
    """Whether a row of ``absent.toml`` says why a call need not fit."""
    same = (kind(version), what) == (row["engine"], row["name"])
    return same and ("has" not in row or row["has"] in call)


@pytest.mark.parametrize("row", ABSENT["misfit"], ids=lambda row: row["name"])
def test_every_misfit_of_the_list_is_one(row):
    found = [
        (version, what, call)
        for version in FACTS
        for name in asked(version)
        if row["name"].startswith(name) and is_there(version, name)
        for what, call, _ in misfits(version, name)
    ]
    assert any(excuses(row, *misfit) for misfit in found) and row["reason"]


@pytest.mark.parametrize("version", FACTS)
def test_an_engine_starts(version):
    """Nothing is missing of what its files read when they are imported."""
    files = START[kind(version)]
    names = asked(version)
    needed = [name for name, fact in names.items() if files & {*fact.get("files", ())}]
    assert len(needed) > 5
    missing = {name for name in needed if not is_there(version, name)}
    assert missing == set()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_wheel_is_for_the_version_that_the_newest_engine_pins(engine):
    versions = [version for version in FACTS if kind(version) == engine]
    newest = max(versions, key=lambda version: Version(version.partition(" ")[2]))
    assert ENGINES[engine] == FACTS[newest]["pins"]
