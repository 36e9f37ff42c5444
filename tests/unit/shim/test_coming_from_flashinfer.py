# SPDX-License-Identifier: Apache-2.0
"""docs/coming_from_flashinfer.md calls missing what is missing, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import precast
from precast._base import env
from precast.shim import ENGINES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def guide(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import coming_from_flashinfer

    return coming_from_flashinfer


def text(guide: ModuleType) -> str:
    return (ROOT / guide.PAGE).read_text(encoding="utf-8")


def rows_with_options(page: str) -> list[tuple[str, list[str]]]:
    """Engine and names of each row of the table of options."""
    section = page.partition("## What needs an option\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| [^|]* \| ([^|]*) \| [^|]* \| [^|]* \|$", section, re.MULTILINE)
    return [(engine.lower(), re.findall(r"`([\w.]+)`", names)) for engine, names in rows[1:]]


def untrue(guide: ModuleType, rows: list[tuple[str, list[str]]]) -> list[str]:
    """Names that the engine does not ask for, or that are there."""
    return [
        f"{engine}: {name}"
        for engine, names in rows
        for name in names or ["no name"]
        if name not in guide.missing(guide.newest(engine))
    ]


def test_the_tables_are_made_from_the_facts(guide):
    assert text(guide) == guide.made(text(guide)), "Fix: make generate"


def test_what_needs_an_option_is_missing(guide):
    rows = rows_with_options(text(guide))
    assert {engine for engine, _ in rows} == ENGINES.keys()
    assert untrue(guide, rows) == [], "it is there now, or nobody asks for it: remove the row"


def test_a_row_about_what_is_there_is_found(guide):
    rows = [("vllm", ["norm.rmsnorm", "gdn_prefill.chunk_gated_delta_rule"]), ("sglang", [])]
    assert untrue(guide, rows) == ["vllm: norm.rmsnorm", "sglang: no name"]


def test_the_families_hold_every_missing_name_once(guide):
    rows = re.findall(r"^\| [^|]+ \| (\d+|-) \| (\d+|-) \| `", guide.families(), re.MULTILINE)
    assert len(rows) == len(guide.ABSENT["family"])
    for column, engine in enumerate(guide.TITLES):
        counts = [int(row[column]) for row in rows if row[column] != "-"]
        assert sum(counts) == len(guide.missing(guide.newest(engine)))


def test_the_newest_version_is_by_number(guide, monkeypatch):
    monkeypatch.setattr(guide, "ASKED", {"vllm 0.9.0": {}, "vllm 0.33.0": {}, "sglang 1.0": {}})
    assert guide.newest("vllm") == "vllm 0.33.0"


def test_settings_that_the_page_names_exist(guide):
    known = {row.name for row in env.REGISTRY}
    assert set(re.findall(r"\bPRECAST_[A-Z_]+", text(guide))) <= known
    assert not any(name.startswith("FLASHINFER_") for name in known)


def test_the_alias_of_the_page_has_the_modules():
    import precast as flashinfer

    assert flashinfer.norm.rmsnorm is precast.rmsnorm
    assert flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper
