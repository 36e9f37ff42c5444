# SPDX-License-Identifier: Apache-2.0
"""The walkthrough of CONTRIBUTING.md, followed for an op that does not exist: ``shift``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from precast._jit.toolchain import find_toolchain
from precast.errors import ToolchainError

ROOT = Path(__file__).resolve().parents[3]
#: What the op consists of, and what it is built, listed and tested by.
FOLDERS = ("aot_configs", "benchmarks", "csrc", "include", "python", "tests/gpu")
NEW_FILES = {
    "aot_configs/shift.toml",
    "benchmarks/bench_shift.py",
    "csrc/elementwise/shift.cu",
    "csrc/elementwise/shift_binding.cc",
    "include/precast/elementwise/shift.cuh",
    "python/precast/_ops/elementwise/shift.py",
    "tests/gpu/cases_shift.py",
}


def _walkthrough() -> ModuleType:
    path = ROOT / "docs" / "walkthrough.py"
    spec = importlib.util.spec_from_file_location("walkthrough", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # NamedTuple looks its module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


WALKTHROUGH = _walkthrough()
PAGE = (ROOT / WALKTHROUGH.PAGE).read_text(encoding="utf-8")


def _renamed(text: str) -> str:
    """The op that a reader of the walkthrough makes of ``scale``: ``shift(input, amount)``."""
    for old, new in (("scale", "shift"), ("Scale", "Shift"), ("factor", "amount")):
        text = text.replace(old, new).replace(old.upper(), new.upper())
    return re.sub(r"\*(=?)( (?:p\.|torch\.tensor\()?amount)", r"+\1\2", text)


def _contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A copy of the sources with ``shift`` added, and what was there before."""
    root = tmp_path_factory.mktemp("walkthrough")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "results", "*.egg-info")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    before = _contents(root)
    for block in WALKTHROUGH.blocks(PAGE):
        path = root / _renamed(block.path)
        if block.whole:
            assert not path.exists(), path
            path.write_text(_renamed(block.code), encoding="utf-8")
            continue
        text = path.read_text(encoding="utf-8")
        for line in block.code.splitlines(keepends=True):
            assert text.count(line) == 1, f"{block.path} has no single line {line!r}"
            text = text.replace(line, line + _renamed(line))
        path.write_text(text, encoding="utf-8")
    return root, before


@pytest.fixture
def root(trees: tuple[Path, dict[str, bytes]]) -> Path:
    return trees[0]


def python(root: Path, cache: Path, *args: str) -> str:
    """Run Python on the copy, with no setting of this machine."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECAST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "python"), str(root / "tests/gpu")])
    environment["PRECAST_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, *args], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_page_shows_the_files_as_they_are() -> None:
    assert WALKTHROUGH.synced(PAGE, ROOT) == PAGE, "Fix: make walkthrough"


def test_sync_replaces_what_has_drifted(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("// SPDX-License-Identifier: Apache-2.0\nint new;\n")
    page = "x\n```cpp file=a.cu\nint old;\n```\ny\n```py file=b.py lines\nkeep\n```\n"
    want = page.replace("old", "new")
    assert WALKTHROUGH.synced(page, tmp_path) == want
    assert WALKTHROUGH.synced(want, tmp_path) == want


def test_only_the_new_files_and_the_line_of_init(trees: tuple[Path, dict[str, bytes]]) -> None:
    root, before = trees
    after = _contents(root)
    assert set(after) - set(before) == NEW_FILES
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"python/precast/__init__.pyi"}
    old, new = (c["python/precast/__init__.pyi"].decode().splitlines() for c in (before, after))
    added = "from precast._ops.elementwise.shift import shift as shift"
    assert [line for line in new if line not in old] == [added]


def test_planned_and_listed(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    python(root, tmp_path, "-m", "precast.jit", "json", "--root", str(root), "--out", str(out))
    modules = json.loads(out.read_text())["modules"]
    assert {"shift__dtype_f16", "shift__dtype_bf16", "shift__dtype_f32"} <= set(modules)
    listed = json.loads(
        python(root, tmp_path, "-m", "precast", "list", "--op", "shift", "--arch", "9.0", "--json")
    )
    rows = {row["module"]: row["arch"] for row in listed["modules"]}
    assert rows["shift__dtype_bf16"] == "sm90a"


def test_reference_and_test_row(root: Path, tmp_path: Path) -> None:
    code = """
import torch, precast
from gpu_cases import CASES

with precast.reference_mode():
    out = precast.shift(torch.tensor([1.0, -2.0]), 0.5)
    assert out.tolist() == [1.5, -1.5], out
    case = CASES["shift"]
    case.check(case.arguments((5, 7), torch.bfloat16, torch.Generator(), "cpu"))
"""
    python(root, tmp_path, "-c", code)


def test_traced(root: Path, tmp_path: Path) -> None:
    code = """
import torch, precast
from precast.trace import check_template, make_inputs, registered

definition = precast.shift.fi_trace(torch.empty(3, 5, device="meta"), 0.5)
assert definition["name"] == "shift_2d_f32", definition
assert definition["description"] == "out = input + amount", definition
assert definition["tags"] == ["fi_api:precast.shift"], definition
assert [*definition["inputs"]] == ["input", "amount"], definition
names = {}
exec(definition["reference"], names)
assert names["run"](torch.tensor([1.0, -2.0]), 0.5).tolist() == [1.5, -1.5]
((function, template),) = [pair for pair in registered() if pair[0] is precast.shift]
assert check_template(function, template) == []
with precast.reference_mode():
    assert function(**make_inputs(function, template)).numel() > 1
"""
    python(root, tmp_path, "-c", code)


def test_compiles_and_loads(root: Path, tmp_path: Path) -> None:
    try:
        find_toolchain()
    except ToolchainError as error:
        pytest.skip(str(error))
    code = """
import torch, precast
from precast._plan.installed import plan
from precast.jit import JitSpec

gpu = torch.cuda.is_available()
arch = "%d.%d" % torch.cuda.get_device_capability() if gpu else "9.0a"
spec = JitSpec.of(plan().spec("shift", {"dtype": "f32"}, arch))
function = spec.build_and_load().get_function("shift")
x = torch.ones(3, 5)
try:
    function(x, 0.5, x, False)
except ValueError as error:
    print(error)
assert (x == 1).all()
if gpu:
    assert (precast.shift(x.cuda(), 0.5) == 1.5).all()
"""
    assert "shift: input must be a CUDA tensor, got cpu" in python(root, tmp_path, "-c", code)
