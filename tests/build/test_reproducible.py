# SPDX-License-Identifier: Apache-2.0
"""One source tree gives one library, wherever, whenever and with whatever paths it is built.

Whole wheels are compared by ``ci/reproducible.sh``.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from precast._jit.toolchain import Toolchain, find_toolchain
from precast._plan.planner import Plan
from precast._runtime import aot, elf
from precast._runtime.manifest import MANIFEST_NAME
from precast.errors import CompileError

MODULE = "sm80/scale__dtype_f32.so"
KERNEL = "include/precast/elementwise/scale.cuh"


def _build(tree: Path, out: Path) -> Path:
    plan = Plan.load(tree)
    spec = plan.spec("scale", {"dtype": "f32"}, "sm80", find_toolchain().toolkit.major)
    assert spec.file_name == MODULE
    aot.build(plan, [spec], out)
    return out


def _elsewhere(toolchain: Toolchain, folder: Path) -> Toolchain:
    """The same tools by other paths, as a build environment of pip has them."""
    folder.mkdir(parents=True)
    home = toolchain.toolkit.nvcc.parents[1]
    links = {"a cuda": home, "ffi": toolchain.tvm_ffi_include}
    for name, target in links.items():
        (folder / name).symlink_to(target, target_is_directory=True)
    toolkit = dataclasses.replace(
        toolchain.toolkit,
        nvcc=folder / "a cuda" / "bin" / "nvcc",
        include=folder / "a cuda" / toolchain.toolkit.include.relative_to(home),
    )
    return dataclasses.replace(toolchain, toolkit=toolkit, tvm_ffi_include=folder / "ffi")


def _insert(tree: Path, file: str, before: str, line: str) -> None:
    path = tree / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, line + before, 1))


def test_another_place_time_and_toolchain_path_give_the_same_bytes(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Assertions of ours and of a CUDA header, in device code: they hold the names of their files.
    _insert(
        tree,
        KERNEL,
        '#include "precast/core/items.cuh"',
        "#if defined(__CUDACC__)\n"
        "#define CCCL_ENABLE_ASSERTIONS 1\n"
        "#include <cassert>\n"
        "#include <cuda/std/optional>\n"
        "#endif\n",
    )
    _insert(
        tree,
        KERNEL,
        "  const uint32_t item = ",
        "  assert(p.columns > 0);\n"
        "  cuda::std::optional<int64_t> some;\n"
        "  if (p.rows.count > 1) some = p.columns;\n"
        "  if (p.columns > 2) assert(*some > 1);\n",
    )
    other = tmp_path / "another" / "and a much longer place" / "tree"
    shutil.copytree(tree, other)
    first = _build(tree, tmp_path / "first")

    toolchain = _elsewhere(find_toolchain(), tmp_path / "tools")
    monkeypatch.setattr(aot, "find_toolchain", lambda *_: toolchain)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    second = _build(other, tmp_path / "second-out")

    data = (first / MODULE).read_bytes()
    assert data == (second / MODULE).read_bytes()
    assert (first / MANIFEST_NAME).read_bytes() == (second / MANIFEST_NAME).read_bytes()
    # Neither place nor tool left its path; the names of files are there without it.
    data += _device_code(first / MODULE, tmp_path / "cubins")
    for place in (tmp_path, toolchain.toolkit.nvcc.resolve().parents[1]):
        assert str(place).encode() not in data
    assert b"\0" + KERNEL.encode() + b"\0" in data
    assert b"include/optional\0" in data


def _device_code(library: Path, folder: Path) -> bytes:
    """What the library holds compressed."""
    folder.mkdir()
    subprocess.run([elf.find_cuobjdump(), "-xelf", "all", library], cwd=folder, check=True)
    (cubin,) = folder.iterdir()
    return cubin.read_bytes()


@pytest.mark.parametrize("file", ["csrc/elementwise/scale.cu", "csrc/elementwise/scale_binding.cc"])
def test_the_time_of_a_build_is_rejected(tree: Path, tmp_path: Path, file: str) -> None:
    _insert(tree, file, "namespace precast {", "extern const char* const built = __TIME__;\n")
    with pytest.raises(CompileError, match="might prevent reproducible builds"):
        _build(tree, tmp_path / "out")
