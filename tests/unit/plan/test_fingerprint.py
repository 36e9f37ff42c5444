# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a module: all that can change its machine code, and nothing else."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path

import pytest

from precast._plan.includes import include_closure
from precast._plan.places import source_root
from precast._plan.planner import Plan
from precast._plan.spec import ModuleSpec
from precast._runtime.custom import gen_jit_spec


def spec(root: Path, arch: str = "9.0", major: int = 13, **axes: object) -> ModuleSpec:
    return Plan.load(root).spec("scale", axes or {"dtype": "f32"}, arch, major)


def append(path: Path) -> None:
    with path.open("a") as out:
        out.write("\n// changed\n")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


CHANGES = {
    "kernel source": lambda root: append(root / "csrc/elementwise/scale.cu"),
    "binding source": lambda root: append(root / "csrc/elementwise/scale_binding.cc"),
    "its header": lambda root: append(root / "include/precast/elementwise/scale.cuh"),
    "nested header": lambda root: append(root / "include/precast/core/types.cuh"),
    "header beside": lambda root: append(root / "csrc/core/tvm_ffi_utils.h"),
    "version script": lambda root: append(root / "csrc/core/exports.map"),
    "nvcc flag": lambda root: edit(root / "aot_configs/build.toml", '"-O3"', '"-O2"'),
    "flag of the CUDA major": lambda root: edit(
        root / "aot_configs/build.toml", '["--compress-mode=size"]', "[]"
    ),
    "host flag": lambda root: edit(root / "aot_configs/build.toml", "host = [", 'host = ["-g", '),
    "link flag": lambda root: edit(root / "aot_configs/build.toml", '"-shared"', '"-shared", "-g"'),
    "flag of the op": lambda root: edit(
        root / "aot_configs/scale.toml", "exports =", 'cuda_flags = ["-lineinfo"]\nexports ='
    ),
    "tvm-ffi range": lambda root: edit(root / "aot_configs/build.toml", '"0.2"', '"0.3"'),
    "exports": lambda root: edit(root / "aot_configs/scale.toml", '["scale"]', '["scale", "more"]'),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_changes_with(tree, name):
    before = spec(tree).fingerprint
    CHANGES[name](tree)
    assert spec(tree).fingerprint != before


def test_it_changes_with_target_cuda_major_and_axes(tree):
    variants = [
        spec(tree),
        spec(tree, arch="8.0"),
        spec(tree, arch="9.0", major=12),
        spec(tree, dtype="bf16"),
        dataclasses.replace(spec(tree), name="other"),
        dataclasses.replace(spec(tree), defines=("PRECAST_SM=90",)),
        dataclasses.replace(spec(tree), cuda_major=12),
        dataclasses.replace(spec(tree), arch=Plan.load(tree).arch("9.0f", any_suffix=True)),
    ]
    assert len({s.fingerprint for s in variants}) == len(variants)


def test_it_does_not_change_with_place_time_or_environment(tree, tmp_path, monkeypatch):
    before = spec(tree).fingerprint
    elsewhere = tmp_path / "some" / "where" / "else"
    shutil.copytree(tree, elsewhere)
    for path in elsewhere.rglob("*"):
        os.utime(path, (1, 1))
    environment = dict(os.environ)
    for name in environment:
        monkeypatch.delenv(name)
    for name in reversed(environment):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setenv("PRECAST_JIT", "warn")
    monkeypatch.chdir(elsewhere)
    assert spec(elsewhere).fingerprint == before


def test_it_does_not_change_with_the_package_version(tree, monkeypatch):
    before = Plan.load(tree).document
    monkeypatch.setattr("precast._plan.planner.__version__", "99.0")
    after = Plan.load(tree).document
    assert after["version"] == "99.0" != before["version"]
    assert after["modules"] == before["modules"]


def test_it_does_not_change_with_another_ops_files(tree):
    before = spec(tree).fingerprint
    append(tree / "csrc/norm/norm.cu")
    edit(tree / "aot_configs/norm.toml", "description", "# changed\ndescription")
    assert spec(tree).fingerprint == before


def test_a_kernel_of_a_user(tmp_path, monkeypatch):
    def make(folder: Path) -> ModuleSpec:
        (folder / "inc").mkdir(parents=True, exist_ok=True)
        (folder / "k.cu").write_text('#include "near.h"\n#include <far.h>\n')
        (folder / "near.h").write_text("// near\n")
        (folder / "inc" / "far.h").write_text("// far\n")
        return gen_jit_spec(
            "k", [folder / "k.cu"], arch="9.0a", cuda_major=13, extra_include_paths=[folder / "inc"]
        )

    first = make(tmp_path / "a").fingerprint
    assert make(tmp_path / "b").fingerprint == first
    for header in ("near.h", "inc/far.h"):
        other = make(tmp_path / "c")
        append(tmp_path / "c" / header)
        assert other.fingerprint != first


# -- the include scan -----------------------------------------------------------------------------


def scan(folder: Path, text: str, *folders: Path) -> list[str]:
    source = folder / "s.cu"
    source.write_text(text)
    return [path.name for path in include_closure([source], folders)[1:]]


def test_scan_follows_what_it_can_resolve(tmp_path):
    inc = tmp_path / "inc"
    inc.mkdir()
    for name, text in {"a.h": '#include "b.h"', "b.h": "#include <a.h>", "c.h": ""}.items():
        (inc / name).write_text(text)
    (tmp_path / "beside.h").write_text("")
    text = """
    #include <cuda_runtime.h>
    #include"beside.h"
    #if 0
    #  include <a.h>
    #endif
    // #include <c.h>
    """
    assert scan(tmp_path, text, inc) == ["beside.h", "a.h", "b.h"]


def test_the_scan_can_follow_every_include_of_the_library():
    root = source_root()
    for path in [*(root / "csrc").rglob("*.*"), *(root / "include").rglob("*.cuh")]:
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                assert re.match(r"""#include (<[^>]+>|"[^"]+")( *//.*)?$""", line), (path, line)


def test_scan_looks_beside_the_file_first_for_quotes_only(tmp_path):
    inc = tmp_path / "inc"
    inc.mkdir()
    (inc / "x.h").write_text('#include "in_inc.h"')
    (inc / "in_inc.h").write_text("")
    (tmp_path / "x.h").write_text("")
    assert scan(tmp_path, '#include "x.h"', inc) == ["x.h"]
    assert scan(tmp_path, "#include <x.h>", inc) == ["x.h", "in_inc.h"]
