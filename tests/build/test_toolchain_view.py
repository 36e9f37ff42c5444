# SPDX-License-Identifier: Apache-2.0
"""CMake builds with the toolkit that pip installs, whose layout is not what CMake expects."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from build_support import PACKAGE, PLAN, ROOT, configure, run

from precast._jit.toolchain import Toolkit, find_toolchain, view_directory
from precast._runtime.manifest import read_manifest


def _pip_layout(home: Path, *libraries: str) -> Toolkit:
    for name in ("bin/nvcc", "bin/ptxas", "include/cuda_runtime_api.h", "nvvm/bin/cicc"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"{home.name} {name}")
    (home / "lib").mkdir()
    for name in ("libcudart.so.13", *libraries):
        (home / "lib" / name).write_text(f"{home.name} {name}")
    return Toolkit(
        "test", home / "bin/nvcc", (13, 0), "13.0", home / "include", home / "lib/libcudart.so.13"
    )


def test_view_shows_the_layout_of_a_system_toolkit(tmp_path: Path) -> None:
    toolkit = _pip_layout(tmp_path / "one")
    view = view_directory(toolkit, tmp_path / "view")
    assert (view / "lib64" / "libcudart.so").read_text() == "one libcudart.so.13"
    assert (view / "lib64" / "libcudart.so.13").read_text() == "one libcudart.so.13"
    assert (view / "include" / "cuda_runtime_api.h").is_file()
    assert (view / "nvvm" / "bin" / "cicc").is_file()
    # nvcc finds its parts beside the path it is called by; a link to the folder would lead away.
    assert not (view / "bin").is_symlink()
    assert (view / "bin" / "nvcc").is_symlink()


def test_view_follows_a_change_of_toolkit(tmp_path: Path) -> None:
    view = tmp_path / "view"
    view_directory(_pip_layout(tmp_path / "one", "libgone.so"), view)
    view_directory(_pip_layout(tmp_path / "two"), view)
    for name in ("bin/nvcc", "bin/ptxas", "lib64/libcudart.so", "include/cuda_runtime_api.h"):
        assert (view / name).read_text().startswith("two ")
    assert not (view / "lib64" / "libgone.so").is_symlink()


_FAKE_DRIVER = r"""
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) { *count = 3; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const bool major = attribute == 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  *value = device == 12 ? (major ? 8 : 6) : (major ? 9 : 0);
  return attribute == 75 || attribute == 76 ? 0 : 1;
}
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
}
"""


def test_targets_default_to_the_gpus_present(tmp_path: Path) -> None:
    """A driver library that says there are two 9.0 and one 8.6."""
    source, plan = tmp_path / "driver.cc", tmp_path / "toolchain.cmake"
    source.write_text(_FAKE_DRIVER)
    run(
        [
            find_toolchain().host_compiler,
            "-shared",
            "-fPIC",
            source,
            "-o",
            tmp_path / "libcuda.so.1",
        ]
    )
    run(
        [sys.executable, "-m", "precast.jit", "toolchain", "--root", ROOT, "--archs", ""]
        + ["--view", tmp_path / "view", "--out", plan],
        {"LD_LIBRARY_PATH": str(tmp_path), "MAX_JOBS": "7"},
    )
    text = plan.read_text()
    assert "set(PRECAST_TARGETS [==[9.0a 8.6]==])" in text
    assert "set(PRECAST_JOBS [==[7]==])" in text


def _pip_toolkit() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for nvcc in Path(folder).glob("cu*/bin/nvcc"):
            return nvcc.parents[1]
    return None


@pytest.mark.skipif(_pip_toolkit() is None, reason='needs pip install "precast[jit]"')
def test_cmake_builds_with_the_toolkit_from_pip(tmp_path: Path) -> None:
    home = _pip_toolkit()
    assert home is not None
    tree = tmp_path / "tree"
    configure(
        tree,
        {"PRECAST_CUDA_HOME": str(home)},
        PRECAST_PROFILE="ci",
        PRECAST_CUDA_ARCH_LIST="9.0a",
    )
    spec = next(s for s in PLAN.modules("ci", PLAN.archs("9.0a")) if s.op == "scale")
    run(["cmake", "--build", tree, "--target", f"{spec.arch.name}-{spec.name}"])
    assert (tree / spec.file_name).is_file()
    commands = run(["ninja", "-C", tree, "-t", "commands"])
    assert str(home / "bin" / "nvcc") in commands
    assert str(home / "lib" / "libcudart.so.13") in commands
    # Only one module was built, so what would be installed is not what was planned.
    out = run(["cmake", "--install", tree, "--prefix", tmp_path / "prefix"], fails=True)
    assert "cannot find" in out or "missing" in out
    with pytest.raises(ValueError, match="cannot be read"):
        read_manifest(tmp_path / "prefix" / PACKAGE)
    assert os.environ.get("PRECAST_CUDA_HOME") != str(home)
