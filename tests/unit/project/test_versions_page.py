# SPDX-License-Identifier: Apache-2.0
"""docs/versions.md: its tables have the ranges of the metadata and of the plan."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from precast._plan.planner import Plan

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from sitegen import versions

    return versions


def cells(table: str) -> dict[str, str]:
    """The rows of a table, by their first cells."""
    rows = re.findall(r"^\| `?([\w.-]+)`? \| (.*) \|$", table, re.MULTILINE)
    return dict(rows[2:])  # Less the titles and the line below them.


def test_ranges_are_those_of_the_metadata(versions):
    rows = cells(versions.requirements())
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    python = re.search(r'^requires-python = ">=(.*)"$', project, re.MULTILINE)
    torch = re.search(r'^ {2}"torch>=([\d.]+)"', project, re.MULTILINE)
    build = Plan.load(ROOT).build
    assert rows["Python"] == f"{python[1]} or later"
    assert rows["torch"] == f"{torch[1]} or later"
    ffi = f"{build.tvm_ffi_min} or later, below {build.tvm_ffi_max_exclusive}"
    assert rows["apache-tvm-ffi"] == ffi
    assert rows["tomli"] == '2 or later (only if `python_version < "3.11"`)'


@pytest.mark.parametrize(
    ("specifier", "words"),
    [
        (">=3.10", "3.10 or later"),
        ("<0.2,>=0.1.9", "0.1.9 or later, below 0.2"),
        ("==13.*", "`==13.*`"),
        (">=1,<=2", "`>=1,<=2`"),
        (">=1,!=1.5", "`>=1,!=1.5`"),
    ],
)
def test_ranges_become_words(versions, specifier, words):
    assert versions._range(specifier) == words


def test_every_cuda_major_has_its_driver(versions):
    rows = cells(versions.cuda())
    build = Plan.load(ROOT).build
    assert rows.keys() == {str(major) for major in build.cuda}
    for major in build.cuda.values():
        assert rows[str(major.major)].startswith(f"{major.min_driver} | `{major.cudart}`, of ")


def test_formats_are_those_of_the_code(versions, monkeypatch):
    monkeypatch.setattr(versions, "PLAN_SCHEMA", 71)
    monkeypatch.setattr(versions, "MANIFEST_SCHEMA", 72)
    monkeypatch.setattr(versions, "CACHE_LAYOUT", "v73")
    table = versions.formats()
    assert re.findall(r"\| (\d+) \|$", table, re.MULTILINE) == ["71", "72", "73"]
    assert "`v73`" in table


def test_an_extra_requires_modules_of_the_version_of_the_core(versions):
    metadata = versions._core(versions._toml("pyproject.toml"))
    extras = metadata["optional-dependencies"]
    modules = {name: needs for name, needs in extras.items() if re.match(r"cu\d", name)}
    assert len(modules) > 10
    for name, needs in modules.items():
        assert needs == [f"precast-jit-cache-{name}=={metadata['version']}"]
