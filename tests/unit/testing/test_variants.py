# SPDX-License-Identifier: Apache-2.0
"""benchmarks/variants.py: what a variant changes, and the table of its times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_support import ROOT, benchmarks, write_run

__all__ = ["benchmarks"]

FILE = "include/precast/attention/plan.cuh"
LINE = "constexpr int kManySplits = 20;"


@pytest.fixture
def variants(benchmarks: Any) -> Any:
    return benchmarks("variants")


def test_a_variant_is_a_copy_with_its_changes(variants: Any, tmp_path: Path) -> None:
    name, changes = variants.parse_variant(
        f"a={FILE}: kManySplits = 20 -> kManySplits = 12;;{FILE}:#pragma once->// once"
    )
    assert name == "a"
    tree = variants.copy_tree(tmp_path / "a")
    variants.apply(changes, tree)
    text = (ROOT / FILE).read_text()
    assert LINE in text
    changed = text.replace("kManySplits = 20", "kManySplits = 12")
    assert (tree / FILE).read_text() == changed.replace("#pragma once", "// once")
    assert (tree / "benchmarks" / "run.py").is_file()
    assert not (tree / "benchmarks" / "results").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "a change must be FILE: OLD -> NEW"),
        (f"a={FILE}", "a change must be FILE: OLD -> NEW"),
        (f"a={FILE}: kManySplits", "a change must be FILE: OLD -> NEW"),
        (f"base={FILE}: x -> y", "a name other than 'base'"),
        (f"={FILE}: x -> y", "a name other than 'base'"),
        (f"a={FILE}: no such text -> y", "must stand there once, got 0"),
        (f"a={FILE}: constexpr -> y", "must stand there once, got"),
        ("a=include/nowhere.cuh: x -> y", "no such file"),
    ],
)
def test_a_wrong_change_is_said(
    text: str, words: str, variants: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert variants.main(["--variant", text]) == 2
    assert words in capsys.readouterr().err


def test_all_run_in_turn_and_are_compared_with_the_base(
    variants: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(folder: Path, arguments: Sequence[str], out: Path) -> bool:
        assert list(arguments) == ["--routine", "scale"]
        ran.append((folder.name, out.name))
        out.mkdir(parents=True)
        rounds = {"first": 99.0, "round0": 10.0, "round1": 12.0, "round2": 11.0}
        time = rounds[out.name] * (0.5 if folder.name == "a" else 1.0)
        write_run(out / "scale_bf16.json", {"scale [1]": time})
        return True

    monkeypatch.setattr(variants, "run", run)
    change = f"a={FILE}: kManySplits = 20 -> kManySplits = 12"
    assert variants.main(["--variant", change, "--", "--routine", "scale"]) == 0
    assert ran[2:] == [(name, f"round{i}") for i in range(3) for name in ("base", "a")]
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["case", "base", "us", "a", "us", "x"]
    assert row.split()[-3:] == ["11.00", "5.50", "2.000"]


def test_each_variant_compiles_into_a_cache_of_its_own(
    variants: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PRECAST_KERNEL_DIR", "/prebuilt")
    found = variants.environment(tmp_path)
    assert "PRECAST_KERNEL_DIR" not in found
    assert found["PRECAST_CACHE_DIR"] == str(tmp_path / "cache")
    assert found["PYTHONPATH"].split(":")[0] == str(tmp_path / "tree" / "python")


def test_a_run_that_fails_ends_all(
    variants: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(variants, "run", lambda folder, *_: folder.name == "base")
    change = f"a={FILE}: kManySplits = 20 -> kManySplits = 12"
    assert variants.main(["--variant", change]) == 1
    assert "case" not in capsys.readouterr().out
