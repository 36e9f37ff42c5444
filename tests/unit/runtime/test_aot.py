# SPDX-License-Identifier: Apache-2.0
"""``precast.aot`` around its compilers: what it needs, who builds, and modes of what it writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from compiler_support import TOOLCHAIN

from precast._plan.installed import plan
from precast._runtime import aot, elf
from precast.errors import ProviderError, ToolchainError


def test_what_reads_modules_is_looked_for_before_anything_is_compiled(tmp_path, monkeypatch):
    def never(*args):
        raise AssertionError("a compiler is looked for")

    monkeypatch.setattr(aot, "find_toolchain", never)
    monkeypatch.setattr(elf.importlib.util, "find_spec", lambda name: None)
    specs = plan().modules("ci", plan().archs("9.0a"), 13)
    with pytest.raises(
        ToolchainError, match=r'no pyelftools.* Fix: pip install "precast\[build\]"'
    ):
        aot.build(plan(), specs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_second_builder_of_a_folder_is_told_who_is_there(tmp_path):
    with aot._only_builder(tmp_path):
        text = f"process {os.getpid()} on .* builds into {tmp_path}. Fix: wait for it"
        with pytest.raises(ProviderError, match=text), aot._only_builder(tmp_path):
            pytest.fail("two processes build into one folder")
    with aot._only_builder(tmp_path):
        pass


def test_only_folders_of_a_build_that_was_begun_here_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "find_toolchain", lambda *args: TOOLCHAIN)
    monkeypatch.setattr(aot, "_build", lambda *args: args[3])
    specs = plan().modules("ci", plan().archs("9.0a"), 13)[:1]
    left = tmp_path / ".work-notes"
    left.mkdir()
    aot.build(plan(), specs, tmp_path)
    assert left.exists()
    aot.build(plan(), specs, tmp_path)
    assert not left.exists()
    monkeypatch.chdir(tmp_path)
    assert aot.build(plan(), specs, Path("out")) == tmp_path / "out"


def test_a_pipe_in_the_place_of_a_module_is_not_built(tmp_path):
    spec = plan().spec("scale", {"dtype": "f32"}, "9.0", 13)
    library = tmp_path / "work.so"
    library.write_bytes(b"library")
    aot._make_folder(tmp_path / "out")
    aot._Builder(TOOLCHAIN, tmp_path / "out", tmp_path)._publish(spec, library, 1.0)
    assert aot.is_built(spec, TOOLCHAIN, tmp_path / "out")
    (tmp_path / "out" / spec.file_name).unlink()
    os.mkfifo(tmp_path / "out" / spec.file_name)
    assert not aot.is_built(spec, TOOLCHAIN, tmp_path / "out")


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_modules_have_the_same_modes_under_any_umask(tmp_path, mask):
    spec = plan().spec("scale", {"dtype": "f32"}, "9.0", 13)
    before = os.umask(mask)
    try:
        library = tmp_path / "work.so"
        library.write_bytes(b"library")
        library.chmod(0o777 & ~mask)
        out = tmp_path / "out"
        aot._make_folder(out)
        aot._Builder(TOOLCHAIN, out, tmp_path)._publish(spec, library, 1.0)
    finally:
        os.umask(before)
    target = out / spec.file_name
    modes = {path.name: path.stat().st_mode & 0o777 for path in (target, target.parent, out)}
    assert modes == {target.name: 0o644, Path(target).parent.name: 0o755, "out": 0o755}
