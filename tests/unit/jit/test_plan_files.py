# SPDX-License-Identifier: Apache-2.0
"""What CMake is told before it builds anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from precast._jit import plan_files
from precast._plan.places import SOURCE_FOLDERS

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("name", ["o'brien", "a,b", "a;b", "$(x)", 'a"b', "a`b", "a\nb"])
@pytest.mark.parametrize("what", ["checkout", "build folder"])
def test_a_folder_that_a_shell_would_change_is_named(tmp_path, capsys, name, what, linked):
    odd = tmp_path / name
    (odd / "python").mkdir(parents=True)
    for part in (*SOURCE_FOLDERS, "pyproject.toml"):
        (odd / part).parent.mkdir(exist_ok=True)
        (odd / part).symlink_to(ROOT / part)
    place = odd
    if linked:
        place = tmp_path / "plain"
        place.symlink_to(odd)
    root, out = (place, tmp_path) if what == "checkout" else (ROOT, place)
    argv = ["toolchain", "--root", root, "--out", out / "t.cmake", "--view", out / "v"]
    with pytest.raises(SystemExit) as caught:
        plan_files.main([*map(str, argv), "--archs", "9.0a"])
    assert caught.value.code == 2
    assert f"error: the name of the {what}, {odd}" in capsys.readouterr().err
    assert not (out / "t.cmake").exists()


@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no CMake here")
@pytest.mark.parametrize("what", ["checkout", "build folder"])
def test_a_folder_that_is_a_list_in_cmake_is_named(tmp_path, what):
    odd, plain = tmp_path / "a;b", tmp_path / "plain"
    odd.mkdir()
    shutil.copy(ROOT / "CMakeLists.txt", odd)
    source, tree = (odd, plain) if what == "checkout" else (ROOT, odd)
    argv = ["cmake", "-S", source, "-B", tree, "-G", "Ninja", "-DPRECAST_MODE=core"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    text = " ".join(done.stderr.split())
    assert f"the name of {odd} has ';', which CMake would change. Fix: move it" in text
