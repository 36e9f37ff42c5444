# SPDX-License-Identifier: Apache-2.0
"""A JIT cache that others can write, or that somebody else has made, is not written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from loader_support import messages

from precast._base import trust
from precast._jit import cache, env
from precast._jit.owner import holder, sign
from precast.errors import CacheDirectoryError


def place(name: str) -> Path:
    return env.cache_dir() / name.format(machine=os.uname().machine)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
@pytest.mark.parametrize("name", ["", ".work", "cu13-{machine}", "cu13-{machine}/sm90a"])
def test_a_folder_that_others_can_write_gets_no_build(make, name, mode):
    folder = place(name)
    folder.mkdir(parents=True)
    for parent in (folder, *folder.parents):
        if parent.is_relative_to(env.cache_dir()):
            parent.chmod(0o700)
    folder.chmod(mode)
    with pytest.raises(CacheDirectoryError, match=f"others can write it; chmod go-w {folder}"):
        make().build()
    assert not [*env.cache_dir().rglob("*.so")]


@pytest.mark.parametrize("name", ["", ".work", "cu13-{machine}", "cu13-{machine}/sm90a"])
def test_a_folder_that_is_a_link_gets_no_build(make, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder = place(name)
    folder.parent.mkdir(parents=True, mode=0o700)
    for parent in folder.parents:
        if parent.is_relative_to(env.cache_dir()):
            parent.chmod(0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(CacheDirectoryError, match="it is a symbolic link"):
        make().build()
    assert not [*elsewhere.iterdir()]


def test_a_folder_of_another_user_gets_no_build(make, monkeypatch):
    env.writable_cache_dir()
    monkeypatch.setattr(trust.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheDirectoryError, match=r"it belongs to user \d+, not to this user"):
        make().build()


def test_a_default_cache_of_another_user_is_replaced_by_a_private_folder(
    make, monkeypatch, tmp_path, caplog
):
    monkeypatch.delenv("PRECAST_CACHE_DIR")
    monkeypatch.setattr(env, "_default_cache_dir", lambda: tmp_path / "default")
    monkeypatch.setattr(env, "_temporary", {})
    env.cache_dir().mkdir(parents=True)
    env.cache_dir().chmod(0o777)
    path = make().build()
    assert not path.is_relative_to(tmp_path / "default")
    assert f"the cache directory {tmp_path}/default/v1 cannot be written" in messages(caplog)[0]
    env._remove_own(env._temporary[os.getpid()], os.getpid())


def test_the_file_of_the_lock_holder_follows_no_link(make, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    spec = make()
    path = spec.build()
    owner = env.cache_dir() / cache.LOCK_FOLDER / f"{path.parent.name}.owner"
    owner.unlink()
    owner.symlink_to(precious)
    (path.parent / "meta.json").unlink()
    assert spec.build() == path
    assert precious.read_text() == "precious"


def test_a_pipe_in_the_place_of_the_lock_holders_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "owner")
    sign(tmp_path / "owner")
    assert holder(tmp_path / "owner") == "another process"


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o177])
def test_a_build_is_found_again_under_any_umask(make, mask):
    spec = make()
    before = os.umask(mask)
    try:
        path = spec.build()
    finally:
        os.umask(before)
    assert spec.get_library_path() == path
    modes = {p.stat().st_mode & 0o777 for p in path.parent.iterdir()}
    assert modes == {0o644}
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_exchanged_while_it_was_published_is_not_returned(make, monkeypatch):
    rename = Path.rename

    def exchanged(self, to):
        done = rename(self, to)
        if Path(to).parent.name == "sm90a":
            (Path(to) / "scale__dtype_f32.so").write_text("another")
        return done

    monkeypatch.setattr(Path, "rename", exchanged)
    with pytest.raises(CacheDirectoryError, match=r"bytes instead of|sha256 differs"):
        make().build()
