# SPDX-License-Identifier: Apache-2.0
"""Environment variables are parsed strictly, and all are declared in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import precast
from precast._base import env as _env
from precast.errors import EnvironmentVariableError


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("False", False)]
    + [("no", False), ("OFF", False), ("", False), ("  ", False), (" 1 ", True)],
)
def test_booleans(monkeypatch, text, value):
    monkeypatch.setenv("PRECAST_REFERENCE", text)
    assert _env.REFERENCE() is value


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        (_env.REFERENCE, "2", "is not a boolean; legal: 1, true, yes, on or 0, false, no, off"),
        (_env.REFERENCE, "y", "is not a boolean"),
        (_env.JIT, "never", "is unknown; legal: auto, warn, error"),
        (_env.JIT, "0", "is unknown; legal: auto, warn, error"),
        (_env.MAX_JOBS, "0", "is not a whole number of at least 1"),
        (_env.MAX_JOBS, "-1", "is not a whole number of at least 1"),
        (_env.MAX_JOBS, "2.5", "is not a whole number of at least 1"),
        (_env.LOCK_TIMEOUT, "soon", "is not a number of seconds"),
        (_env.LOCK_TIMEOUT, "-1", "is not a number of seconds"),
        (_env.LOCK_TIMEOUT, "inf", "is not a number of seconds"),
        (_env.LOCK_TIMEOUT, "nan", "is not a number of seconds"),
    ],
)
def test_a_value_without_meaning_names_variable_value_and_what_is_legal(
    monkeypatch, variable, text, words
):
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(EnvironmentVariableError) as caught:
        variable()
    assert str(caught.value).startswith(f"{variable.name}={text!r} {words}")
    assert isinstance(caught.value, ValueError)


def test_values(monkeypatch):
    monkeypatch.setenv("PRECAST_JIT", "ERROR")
    monkeypatch.setenv("PRECAST_LOCK_TIMEOUT", "0.5")
    monkeypatch.setenv("MAX_JOBS", "7")
    assert (_env.JIT(), _env.LOCK_TIMEOUT(), _env.MAX_JOBS()) == ("error", 0.5, 7)
    for variable in ("PRECAST_JIT", "PRECAST_LOCK_TIMEOUT", "MAX_JOBS"):
        monkeypatch.delenv(variable)
    assert (_env.JIT(), _env.LOCK_TIMEOUT(), _env.MAX_JOBS()) == ("auto", 300.0, 0)


def test_every_variable_is_declared_once_and_documented():
    names = [row.name for row in _env.REGISTRY]
    assert len(set(names)) == len(names)
    assert all(row.doc.endswith(".") for row in _env.REGISTRY)


def test_no_other_file_reads_an_environment_variable_of_precast():
    package = Path(precast.__file__).parent
    reads = re.compile(r"(environ|getenv)[^\n]*[\"']PRECAST_")
    offenders = [p.name for p in package.rglob("*.py") if reads.search(p.read_text())]
    assert offenders == []
