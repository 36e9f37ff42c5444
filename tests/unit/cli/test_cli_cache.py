# SPDX-License-Identifier: Apache-2.0
"""precast cache: info, prune and clear over a cache with every kind of entry."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from pathlib import Path

import pytest
from cli_support import core_specs, run

from precast._jit.cache import Meta
from precast._jit.env import cache_dir
from precast.cli import main


def add(root: Path, name: str, fingerprint: str, days: float = 0, size: int = 1000) -> Path:
    folder = cache_dir() / "cu13-x86_64" / "sm90a" / f"{name}-{len(list(root.rglob('*.so'))):016x}"
    folder.mkdir(parents=True)
    data = b"x" * size
    (folder / f"{name}.so").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    meta = Meta(name, "sm90a", 13, fingerprint, "nvcc", "0.1.15", size, digest, 1.0)
    (folder / "meta.json").write_text(meta.dump())
    then = time.time() - days * 86400
    for path in folder.iterdir():
        os.utime(path, (then, then))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Two builds that fit (one of them old), one of a user, one stale, one unknown, two damaged."""
    monkeypatch.setenv("PRECAST_CACHE_DIR", str(tmp_path))
    first, second, *_ = core_specs("sm90a")
    made = {
        "fits": add(tmp_path, first.name, first.fingerprint),
        "old": add(tmp_path, second.name, second.fingerprint, days=40),
        "own": add(tmp_path, "my_kernel", "1" * 64, days=10),
        "stale": add(tmp_path, first.name, "2" * 64),
        "unknown": add(tmp_path, "norm__dtype_f64", "3" * 64),
        "no meta": add(tmp_path, first.name, first.fingerprint),
        "changed": add(tmp_path, first.name, first.fingerprint),
    }
    (made["no meta"] / "meta.json").write_text("{}")
    (made["changed"] / f"{first.name}.so").write_bytes(b"y" * 1000)
    return made


def left(cache: dict[str, Path]) -> set[str]:
    return {name for name, folder in cache.items() if folder.exists()}


def test_info_judges_every_build(cache, capsys):
    assert main(["cache", "info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    states = {build["folder"]: build["state"] for build in report["builds"]}
    assert {name: states[str(folder)] for name, folder in cache.items()} == {
        "fits": "ok",
        "old": "ok",
        "own": "ok",
        "stale": "stale",
        "unknown": "stale",
        "no meta": "damaged",
        "changed": "damaged",
    }
    assert report["size"] == sum(build["size"] for build in report["builds"]) > 7000
    assert main(["cache", "info"]) == 0
    out = capsys.readouterr().out
    assert "7 builds" in out.splitlines()[0]
    assert "built from other sources or flags" in out
    assert "norm: dtype=f64 is not supported" in out
    assert left(cache) == set(cache)


def test_prune_takes_what_cannot_be_used(cache, capsys):
    assert main(["cache", "prune", "--dry-run"]) == 0
    assert "would remove 4 of 7 builds" in capsys.readouterr().out
    assert left(cache) == set(cache)
    assert main(["cache", "prune"]) == 0
    assert "removed 4 of 7 builds" in capsys.readouterr().out
    assert left(cache) == {"fits", "old", "own"}


def test_prune_by_age(cache):
    assert main(["cache", "prune", "--older-than", "30"]) == 0
    assert left(cache) == {"fits", "own"}


def test_prune_by_size_takes_the_oldest_first(cache):
    # Each build has 1000 bytes of library and a few hundred of meta.json.
    assert main(["cache", "prune", "--max-size", "3k"]) == 0
    assert left(cache) == {"fits", "own"}
    assert main(["cache", "prune", "--max-size", "0"]) == 0
    assert left(cache) == set()


def test_clear_removes_everything_once_confirmed(cache, capsys):
    assert main(["cache", "clear", "--yes", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {Path(build["folder"]) for build in report["removed"]} == set(cache.values())
    assert left(cache) == set()
    assert main(["cache", "clear"]) == 0  # Nothing is left to ask about.


@pytest.mark.parametrize(("answer", "code"), [("n\n", 2), ("\n", 2), ("y\n", 0)])
def test_clear_asks_a_person(cache, monkeypatch, capsys, answer, code):
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["cache", "clear"]) == code
    assert left(cache) == (set() if code == 0 else set(cache))
    assert "Remove all 7 builds of" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--older-than", "soon"], ["--max-size", "big"]])
def test_a_wrong_limit_is_rejected(argv):
    done = run("cache", "prune", *argv)
    assert done.returncode == 2
    assert f"'{argv[1]}' is not a" in done.stderr


def test_an_empty_cache_is_not_made(tmp_path):
    done = run("cache", "info", PRECAST_CACHE_DIR=str(tmp_path / "c"))
    assert done.returncode == 0
    assert done.stdout.startswith(f"{tmp_path}/c/")
    assert done.stdout.endswith(": 0 builds, 0 B\n")
    assert not (tmp_path / "c").exists()


# -- what is not precast's -------------------------------------------------------------------------


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.mark.parametrize("command", [["prune"], ["prune", "--max-size", "0"], ["clear", "--yes"]])
def test_folders_that_are_no_builds_are_named_and_stay(cache, tmp_path, capsys, command):
    folder = cache_dir()
    strangers = [
        folder / "customers" / "2024" / "jan-invoices",
        folder / "cu13-x86_64" / "docs" / "tax-2025",
        folder / "cu13-x86_64" / "sm90a" / "readme-first",
        folder / "cu13-x86_64" / "sm90a" / "norm-0123456789ABCDEF",
        folder / "cu13" / "sm90a" / "norm-0123456789abcdef",
        folder / ".work" / "notes",
    ]
    for stranger in strangers:
        stranger.mkdir(parents=True)
        (stranger / "a.pdf").write_text("precious")
    (folder / "cu13-x86_64" / "sm90a" / "readme.txt").write_text("precious")
    assert main(["cache", *command]) == 0
    out = capsys.readouterr().out
    for stranger in strangers[:-1]:
        assert (stranger / "a.pdf").read_text() == "precious"
    for foreign in ("customers", "cu13-x86_64/docs", "cu13-x86_64/sm90a/readme.txt", "cu13"):
        assert f"{folder / foreign} is no build of this user: left alone" in out
    assert (strangers[-1] / "a.pdf").exists()  # It is young, and no process is in its name.


@pytest.mark.parametrize("level", ["v1", "major", "arch", "build"])
def test_no_symbolic_link_is_followed(tmp_path, monkeypatch, capsys, level):
    monkeypatch.setenv("PRECAST_CACHE_DIR", str(tmp_path / "cache"))
    places = {
        "v1": cache_dir(),
        "major": cache_dir() / "cu13-x86_64",
        "arch": cache_dir() / "cu13-x86_64" / "sm90a",
        "build": cache_dir() / "cu13-x86_64" / "sm90a" / f"norm-{0:016x}",
    }
    home = tmp_path / "home"
    own = home / places["build"].relative_to(places[level])
    own.mkdir(parents=True)
    (own / "letter").write_text("precious")
    places[level].parent.mkdir(parents=True)
    places[level].symlink_to(home)
    for command in (["prune"], ["clear", "--yes"]):
        assert main(["cache", *command]) == 0
        assert f"{places[level]} is no build" in capsys.readouterr().out
    assert (own / "letter").read_text() == "precious"
    assert places[level].is_symlink()


def test_what_a_killed_compile_left_is_shown_and_removed(cache, capsys):
    from precast._jit import cache as jit_cache

    work = cache_dir() / ".work"
    dead, living = (
        work / f"norm-{jit_cache._host()}-{process}-abc" for process in (2**22 + 1, os.getpid())
    )
    for folder in (dead, living):
        folder.mkdir(parents=True)
        (folder / "half.o").touch()
    assert main(["cache", "info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["leftovers"] == [str(dead)]
    assert main(["cache", "prune"]) == 0
    assert "removed 1 folders that killed compiles have left" in capsys.readouterr().out
    assert not dead.exists()
    assert living.exists()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"arch": null}', "NaN", "[]", "\x00"])
def test_a_meta_file_of_any_kind_is_a_damaged_build(cache, capsys, text):
    (cache["fits"] / "meta.json").write_text(text)
    assert main(["cache", "info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    states = {build["folder"]: build["state"] for build in report["builds"]}
    assert states[str(cache["fits"])] == "damaged"


def test_a_meta_file_with_one_wrong_value_is_a_damaged_build(cache, capsys):
    path = cache["fits"] / "meta.json"
    for name, value in (("arch", None), ("size", "1"), ("compile_seconds", float("nan"))):
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
        assert main(["cache", "info", "--json"]) == 0
        report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        states = {build["folder"]: build["state"] for build in report["builds"]}
        assert states[str(cache["fits"])] == "damaged"
