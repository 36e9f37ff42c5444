# SPDX-License-Identifier: Apache-2.0
"""The JIT cache: published whole or not at all, replaced when unsound, cleaned in time."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from compiler_support import TOOLCHAIN, ShellSpec, left_over
from loader_support import messages

import precast
from precast._jit import cache, env
from precast._jit.toolchain import Toolchain
from precast._plan.places import write_if_different
from precast.errors import CacheDirectoryError, ToolchainError


def staged(spec: ShellSpec, text: str = "mine") -> tuple[Path, Path, cache.Meta]:
    work = cache.work_folder(env.writable_cache_dir(), spec)
    library = work / f"{spec.name}.so"
    library.write_text(text)
    target = cache.entry(env.cache_dir(), spec, TOOLCHAIN)
    return work, target, cache.write_meta(spec, TOOLCHAIN, library, 1.0)


def test_the_second_takes_the_winners_build(make):
    spec = make()
    winner = spec.build()
    work, target, meta = staged(spec)
    assert cache.publish(work, target, spec, meta) == winner
    assert winner.read_text() == "library\n"


@pytest.mark.parametrize("damage", ["library", "meta", "both", "a file in its place", "empty"])
def test_a_build_that_does_not_load_is_replaced(make, damage):
    spec = make()
    path = spec.build()
    if damage in ("library", "both"):
        path.write_text("lib")
    if damage in ("meta", "both"):
        (path.parent / "meta.json").write_text("{}")
    if damage in ("a file in its place", "empty"):
        for file in path.parent.iterdir():
            file.unlink()
    if damage == "a file in its place":
        path.parent.rmdir()
        path.parent.write_text("")
    assert spec.get_library_path() is None
    assert spec.build() == path
    assert path.read_text() == "library\n"
    assert left_over(env.cache_dir()) == []


def test_a_winner_that_is_not_visible_yet_leaves_the_own_copy(make, monkeypatch):
    # On NFS a name may exist for rename and not yet for stat.
    spec = make()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    work, target, meta = staged(spec)
    rename = Path.rename

    def taken(self, to):
        if Path(to) == target:
            raise FileExistsError(17, "File exists")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", taken)
    path = cache.publish(work, target, spec, meta)
    assert path.read_text() == "mine"
    assert not path.is_relative_to(work)
    assert not target.exists()


def test_leftovers_of_the_dead_are_removed_in_time(make):
    spec = make()
    parent = env.writable_cache_dir() / cache.WORK_FOLDER
    old, new = parent / "scale-1-old", parent / "scale-2-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "half.o").touch()
    past = time.time() - cache.STALE_SECONDS - 60
    os.utime(old, (past, past))
    spec.build()
    assert {p.name for p in parent.iterdir()} == {"scale-2-new"}


def test_a_removed_build_is_gone_at_once(make):
    spec = make()
    path = spec.build()
    cache.remove(path.parent)
    assert not path.parent.exists()
    assert left_over(env.cache_dir()) == []


def test_where_a_compiler_is_at_hand_only_its_own_build_counts(make, monkeypatch):
    spec = make()
    path = spec.build()
    newer = dataclasses.replace(TOOLCHAIN, host_version="g++ 13")
    monkeypatch.setattr("precast._jit.toolchain.find_toolchain", lambda *args: newer)
    assert [why for _, why in cache.find(spec).refused] == [
        "built by another compiler than the installed one"
    ]
    monkeypatch.setattr("precast._jit.toolchain.find_toolchain", no_toolchain)
    assert cache.find(spec).path == path
    monkeypatch.setattr("precast._jit.toolchain.find_toolchain", lambda *args: newer)
    precast.freeze()
    assert cache.find(spec).path == path


def no_toolchain(*args: object) -> Toolchain:
    raise ToolchainError("none")


# -- where the cache is ---------------------------------------------------------------------------


def test_a_default_cache_that_cannot_be_written_is_replaced_with_a_word(make, monkeypatch, caplog):
    monkeypatch.delenv("PRECAST_CACHE_DIR")
    monkeypatch.setattr(env, "_default_cache_dir", lambda: Path("/proc/no-cache"))
    monkeypatch.setattr(env, "_temporary", {})
    spec = make()
    path = spec.build()
    assert path.is_file()
    assert spec.build() == spec.get_library_path() == path
    (warning,) = messages(caplog)
    assert warning.startswith("the cache directory /proc/no-cache/v1 cannot be written; modules")
    assert "Fix: set PRECAST_CACHE_DIR" in warning
    env._remove_own(env._temporary[os.getpid()], os.getpid())
    assert not path.exists()


def test_a_configured_cache_that_cannot_be_written_is_an_error(make, monkeypatch):
    monkeypatch.setenv("PRECAST_CACHE_DIR", "/proc/no-cache")
    text = r"PRECAST_CACHE_DIR=/proc/no-cache cannot be written \(.*\). Nothing was compiled. Fix: "
    with pytest.raises(CacheDirectoryError, match=text):
        make().build()


def test_write_if_different_keeps_the_time_stamp(tmp_path):
    path = tmp_path / "d" / "f"
    assert write_if_different(path, "a")
    os.utime(path, (1, 1))
    assert not write_if_different(path, "a")
    assert path.stat().st_mtime == 1
    assert write_if_different(path, "b")
    assert path.read_text() == "b"


def test_the_home_of_an_unknown_user(monkeypatch):
    monkeypatch.setenv("PRECAST_CACHE_DIR", "~no_such_user/cache")
    with pytest.raises(CacheDirectoryError, match=r"PRECAST_CACHE_DIR=~no_such_user/cache: .*Fix"):
        env.cache_dir()
