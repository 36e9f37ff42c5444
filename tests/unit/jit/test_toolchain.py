# SPDX-License-Identifier: Apache-2.0
"""Which compiler is taken, and why another is not; the compilers are lines of shell."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from precast._base import tvm_ffi as _tvm_ffi
from precast._jit import toolchain
from precast._jit.cuda_major import jit_cuda_major
from precast._jit.toolchain import (
    find_toolchain,
    find_toolkit,
    for_host_compiler,
    searching_once,
)
from precast._plan.installed import plan
from precast.errors import ToolchainError

HOPPER, BLACKWELL = plan().arch("9.0"), plan().arch("10.0")


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkit(tmp_path):
    """A factory of toolkit folders."""

    def make(
        name: str, version: str = "13.0", headers: str | None = None, cudart: bool = True
    ) -> Path:
        home = tmp_path / name
        program(
            home / "bin" / "nvcc",
            f'echo "Cuda compilation tools, release {version}, V{version}.88"',
        )
        major, _, minor = (headers or version).partition(".")
        (home / "include").mkdir()
        number = int(major) * 1000 + int(minor) * 10
        (home / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {number}\n")
        if cudart:
            (home / "lib64").mkdir()
            (home / "lib64" / f"libcudart.so.{version.partition('.')[0]}").touch()
        return home

    return make


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """No toolkit but those of the test, a driver of CUDA 13.0, and a host compiler."""
    program(tmp_path / "path" / "g++", 'echo "g++ (Test) 12.2.0"')
    monkeypatch.setenv("PATH", f"{tmp_path}/path")
    monkeypatch.setattr(toolchain, "SYSTEM_TOOLKIT", tmp_path / "none")
    monkeypatch.setattr(toolchain, "_python_toolkit", lambda: None)
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: (13, 0))


def rejection(*arguments: object) -> str:
    with pytest.raises(ToolchainError) as caught:
        find_toolkit(*arguments)
    text = str(caught.value)
    assert text.endswith('\nFix: pip install "precast[jit]"')
    return text


def test_nothing_there_names_every_place():
    assert rejection(HOPPER) == (
        "no CUDA compiler for sm90a:\n  no nvcc in PRECAST_CUDA_HOME, CUDA_HOME, PATH, "
        '/usr/local/cuda or the Python environment\nFix: pip install "precast[jit]"'
    )


def test_the_order_of_places(toolkit, monkeypatch, tmp_path):
    homes = {name: toolkit(name) for name in ("own", "cuda_home", "cuda_path", "on_path", "system")}
    monkeypatch.setenv("PRECAST_CUDA_HOME", str(homes["own"]))
    monkeypatch.setenv("CUDA_HOME", str(homes["cuda_home"]))
    monkeypatch.setenv("CUDA_PATH", str(homes["cuda_path"]))
    monkeypatch.setenv("PATH", f"{homes['on_path']}/bin:{tmp_path}/path")
    monkeypatch.setattr(toolchain, "SYSTEM_TOOLKIT", homes["system"])
    for name, variable in (
        ("own", "PRECAST_CUDA_HOME"),
        ("cuda_home", "CUDA_HOME"),
        ("cuda_path", "CUDA_PATH"),
    ):
        found = find_toolkit(HOPPER)
        assert (found.nvcc, found.origin) == (homes[name] / "bin" / "nvcc", variable)
        monkeypatch.delenv(variable)
    assert find_toolkit(HOPPER).origin == "PATH"
    monkeypatch.setenv("PATH", f"{tmp_path}/path")
    assert find_toolkit(HOPPER).origin == "system"


def test_one_moment_is_searched_once_for_each_target(toolkit, monkeypatch):
    """A list of all modules asks a thousand times; a later call finds what was installed since."""
    monkeypatch.setenv("CUDA_HOME", str(toolkit("old", "12.6")))
    searches, real = [], toolchain.candidates
    monkeypatch.setattr(toolchain, "candidates", lambda: searches.append(1) or real())
    with searching_once():
        first = find_toolkit(HOPPER)
        for _ in range(3):
            assert find_toolkit(HOPPER) is first
            with pytest.raises(ToolchainError):
                find_toolkit(BLACKWELL)
    assert first.version == (12, 6)
    assert len(searches) == 1 + 3  # What is not there is looked for again.
    monkeypatch.setenv("CUDA_HOME", str(toolkit("new")))
    assert find_toolkit(HOPPER).version == (13, 0)


def test_the_next_one_is_taken_where_the_first_does_not_fit(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit("old", "12.4")))
    monkeypatch.setenv("CUDA_PATH", str(toolkit("new", "13.0")))
    assert find_toolkit(HOPPER).version == (12, 4)
    assert find_toolkit(BLACKWELL).version == (13, 0)
    assert find_toolkit(HOPPER, 13).version == (13, 0)
    assert (jit_cuda_major(plan(), HOPPER), jit_cuda_major(plan(), BLACKWELL)) == (12, 13)


@pytest.mark.parametrize(
    ("version", "changes", "arguments", "words"),
    [
        ("12.4", {}, (BLACKWELL,), "cannot target sm_100f (needs >= 12.9)"),
        ("12.4", {}, (HOPPER, 13), "CUDA 12, but CUDA 13 is required"),
        (
            "13.0",
            {"headers": "12.8"},
            (),
            "include are CUDA 12.8: compiler and headers do not agree",
        ),
        (
            "13.0",
            {"headers": "13.1"},
            (),
            "include are CUDA 13.1: compiler and headers do not agree",
        ),
        ("13.0", {"cudart": False}, (), "lib64/libcudart.so.13 is missing"),
        ("14.0", {}, (), "CUDA 14 is not supported; legal: 12, 13"),
    ],
)
def test_disagreements_are_reported(toolkit, monkeypatch, version, changes, arguments, words):
    home = toolkit("t", version, **changes)
    monkeypatch.setenv("CUDA_HOME", str(home))
    text = rejection(*arguments)
    assert f"\n  nvcc {version}.88 (CUDA_HOME, {home}/bin/nvcc): " in text
    assert words in text


def test_a_toolkit_that_the_driver_cannot_serve(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit("t")))
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: (12, 8))
    assert "the driver runs CUDA 12.8 only" in rejection()


def test_a_major_that_nothing_is_planned_for_is_passed_over(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit("unknown", "14.0")))
    monkeypatch.setenv("CUDA_PATH", str(toolkit("known", "13.0")))
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: (14, 0))
    assert find_toolkit(HOPPER).version == (13, 0)
    assert plan().common(jit_cuda_major(plan(), HOPPER))["cuda_major"] == 13


def test_variables_that_change_a_compiler_do_not_reach_it(toolkit, monkeypatch):
    home = toolkit("t")
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("V13.0.88", "V13.0.88$NVCC_APPEND_FLAGS"))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "1")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_toolkit(HOPPER).build == "13.0.88"


def test_missing_headers(toolkit, monkeypatch):
    home = toolkit("t")
    (home / "include" / "cuda_runtime_api.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert (
        f"its headers in {home}/include are none: compiler and headers do not agree" in rejection()
    )


@pytest.mark.parametrize("text", ["exit 1", "echo hello", "kill -9 $$"])
def test_an_nvcc_that_does_not_run(toolkit, monkeypatch, text):
    home = toolkit("t")
    program(home / "bin" / "nvcc", text)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert "it does not run (nvcc --version failed)" in rejection()


def test_a_configured_home_without_a_compiler_is_never_passed_over(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(toolkit("good")))
    monkeypatch.setenv("PRECAST_CUDA_HOME", str(tmp_path / "empty"))
    text = f"PRECAST_CUDA_HOME={tmp_path}/empty has no bin/nvcc. Fix: correct or unset it"
    with pytest.raises(ToolchainError, match=re.escape(text)):
        find_toolkit(HOPPER)


def test_a_wrapper_on_the_path_leads_to_its_toolkit(toolkit, monkeypatch, tmp_path):
    home = toolkit("real")
    program(tmp_path / "path" / "nvcc", f'echo "#$ _HERE_={home}/bin"')
    assert find_toolkit(HOPPER).nvcc == home / "bin" / "nvcc"


def test_host_compilers(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(toolkit("t")))
    found = find_toolchain(HOPPER)
    assert found.host_compiler == tmp_path / "path" / "g++"
    assert found.identity == "nvcc 13.0.88; g++ (Test) 12.2.0"
    other = program(tmp_path / "other" / "clang++", 'echo "clang 18"')
    monkeypatch.setenv("CXX", str(other))
    assert find_toolchain(HOPPER).host_compiler == other
    for wrong in ("no-such-compiler", "ccache g++"):
        monkeypatch.setenv("CXX", wrong)
        with pytest.raises(
            ToolchainError, match=rf"CXX={re.escape(wrong)} is not a program. Fix: "
        ):
            find_toolchain(HOPPER)
    monkeypatch.delenv("CXX")
    (tmp_path / "path" / "g++").unlink()
    text = (
        r"neither g\+\+, c\+\+ nor clang\+\+ is on PATH. Fix: install one \(apt-get install g\+\+"
    )
    with pytest.raises(ToolchainError, match=text):
        find_toolchain(HOPPER)


def test_a_relative_name_means_the_same_to_a_compile_elsewhere(toolkit, monkeypatch, tmp_path):
    home = toolkit("real")
    program(tmp_path / "path" / "nvcc", f'case "$0" in /*) echo "#$ _HERE_={home}/bin";; esac')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "path")
    found = find_toolchain(HOPPER)
    assert (found.toolkit.nvcc, found.host_compiler) == (home / "bin/nvcc", tmp_path / "path/g++")
    program(tmp_path / "other" / "clang++", 'echo "clang 18"')
    monkeypatch.setenv("CXX", "other/clang++")
    assert find_toolchain(HOPPER).host_compiler == tmp_path / "other" / "clang++"
    for name in ("CUDA_HOME", "PRECAST_CUDA_HOME"):
        monkeypatch.setenv(name, "real")
        assert find_toolkit(HOPPER).nvcc == home / "bin" / "nvcc"


def test_missing_headers_of_tvm_ffi(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit("t")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ToolchainError, match=r"headers of tvm-ffi were not found\. Fix: pip install"
    ):
        find_toolchain(HOPPER)


def test_a_tvm_ffi_that_is_too_new(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit("t")))
    monkeypatch.setattr(_tvm_ffi, "version", lambda: "0.2")
    text = (
        r'needs apache-tvm-ffi in \[0.1.15, 0.2\), installed is 0.2. Fix: pip install "apache-tvm'
    )
    with pytest.raises(ToolchainError, match=text):
        find_toolchain(HOPPER, 13, ("0.1.15", "0.2"))


@pytest.mark.parametrize(
    "folder", ["plain", "a b", "x(1)", "c,d", "q'z", "back\\slash", 'dq"x', "$x"]
)
def test_flags_reach_the_host_compiler_through_nvcc_and_a_shell(folder):
    word = for_host_compiler(f"-ffile-prefix-map=/{folder}/=")
    option, _, value = word.partition("=")
    assert option == "-Xcompiler"
    # nvcc: a backslash keeps a comma, and goes; then the shell.
    unescaped = re.sub(r"\\(.)", r"\1", value)
    assert shlex.split(unescaped) == [f"-ffile-prefix-map=/{folder}/="]
