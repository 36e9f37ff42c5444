# SPDX-License-Identifier: Apache-2.0
"""ci/compare_kernels.py accepts a renamed kernel, and rejects a changed one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ci_support import ROOT, script

from precast._jit.toolchain import find_toolchain
from precast._plan.planner import Plan
from precast._runtime.manifest import MANIFEST_NAME, MANIFEST_SCHEMA

compare = script("compare_kernels")

ARCH = "sm90a"
#: `KERNEL`, `FACTOR`, `BOUND` and `PADDING` make the variants.
SOURCE = """
struct Params {
  PADDING
  float* out;
  const float* in;
  float a;
  float b;
};
template <typename T>
__global__ void __launch_bounds__(BOUND) KERNEL(const Params p) {
  p.out[threadIdx.x] = p.a * p.in[threadIdx.x] + FACTOR * p.b;
}
template __global__ void KERNEL<float>(Params);
"""
OLD = {"KERNEL": "PlainKernel", "FACTOR": "3.0f", "BOUND": "128", "PADDING": ""}
VARIANTS = {
    "old": OLD,
    "renamed": {**OLD, "KERNEL": "FusedKernel"},
    "changed": {**OLD, "FACTOR": "4.0f"},
    "bounded": {**OLD, "BOUND": "256"},
    "moved": {**OLD, "PADDING": "long unused;"},
    "moved and changed": {**OLD, "PADDING": "long unused;", "FACTOR": "4.0f"},
}
RENAMED = '[identifiers]\nPlainKernel = "FusedKernel"\n'
PARAMETERS = "[[parameters]]\nkernels = 'PlainKernel<'\nreason = 'Params has one more field'\n"
EXCEPTION = "[[exceptions]]\nkernels = '^void PlainKernel<'\nreason = 'it is faster'\n"

Compare = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like those of ``python -m precast.aot`` for each variant of the kernel."""
    root = tmp_path_factory.mktemp("builds")
    source = root / "tiny.cu"
    source.write_text(SOURCE)
    nvcc = str(find_toolchain().toolkit.nvcc)
    compilers = []
    for variant, macros in VARIANTS.items():
        library = root / variant / ARCH / "tiny.so"
        library.parent.mkdir(parents=True)
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        # What is read back is the machine code, so nothing is compiled for the host or linked.
        command = [nvcc, "-arch=sm_90a", "-cubin", *defines, str(source), "-o", str(library)]
        compilers.append(subprocess.Popen(command))
    assert [compiler.wait() for compiler in compilers] == [0] * len(compilers)
    return root


@pytest.fixture
def run(builds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Compare a variant with the old build; the exit status and what was printed."""

    def call(variant: str, names: str = "", options: Sequence[str] = ()) -> tuple[int, str]:
        path = tmp_path / "names.toml"
        path.write_text(names)
        folders = [str(builds / "old"), str(builds / variant)]
        status = compare.main([*folders, "--map", str(path), *options])
        return status, capsys.readouterr().out

    return call


def summary(equal: int = 0, constants: int = 0, excepted: int = 0, different: int = 0) -> str:
    kernels = equal + constants + excepted + different
    return (
        f"1 modules, {kernels} kernels: {equal} equal, "
        f"{constants} equal but for constant-bank offsets, {excepted} excepted, "
        f"{different} different\n"
    )


def test_the_same_kernel_is_equal(run: Compare) -> None:
    assert run("old") == (0, summary(equal=1))
    status, out = run("old", options=["--all"])
    assert (status, out.splitlines()[0]) == (
        0,
        f"equal: {ARCH}/tiny: void PlainKernel<float>(Params)",
    )


def test_a_renamed_kernel_is_equal_under_the_map_alone(run: Compare) -> None:
    assert run("renamed", RENAMED) == (0, summary(equal=1))
    pattern = "[[patterns]]\nold = 'Plain(\\w+)<'\nnew = 'Fused\\1<'\n"
    assert run("renamed", pattern) == (0, summary(equal=1))
    old, new = (f"void {name}Kernel<float>(Params)" for name in ("Plain", "Fused"))
    assert run("renamed", f'[names]\n"{old}" = "{new}"\n') == (0, summary(equal=1))

    status, out = run("renamed")
    assert status == 1
    assert f"{old}\n    only the old build has it. Fix: " in out
    assert f"say so in the map: {new}\n" in out
    assert f"{new}\n    only the new build has it\n" in out
    assert out.endswith(summary(different=2))


def test_a_changed_kernel_is_rejected(run: Compare) -> None:
    status, out = run("changed")
    assert status == 1
    assert "3" in out.split(" before, ")[0].splitlines()[-1]
    assert "4" in out.split(" before, ")[1].splitlines()[0]
    assert out.endswith(summary(different=1))
    # Nor does a declared change of parameters cover it.
    for variant in ("changed", "moved and changed"):
        status, out = run(variant, PARAMETERS)
        assert (status, out.splitlines()[-1]) == (1, summary(different=1).strip())


def test_changed_launch_bounds_are_rejected(run: Compare) -> None:
    status, out = run("bounded")
    assert status == 1
    assert "launch attributes: {'most threads'" in out


def test_an_exception_is_listed_with_its_reason(run: Compare) -> None:
    status, out = run("changed", EXCEPTION)
    assert status == 0
    assert f"excepted: {ARCH}/tiny: void PlainKernel<float>(Params)\n    it is faster (" in out
    assert out.endswith(summary(excepted=1))


def test_moved_parameters_must_be_declared(run: Compare) -> None:
    status, out = run("moved", PARAMETERS)
    assert (status, out.splitlines()[-1]) == (0, summary(constants=1).strip())
    assert "Params has one more field" in out

    status, out = run("moved")
    assert status == 1
    assert "constant bank 0: " in out
    assert "Fix: if a parameter struct was changed on purpose" in out


def test_a_module_without_a_partner_is_rejected(
    builds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "two" / ARCH
    folder.mkdir(parents=True)
    for name in ("tiny", "more"):
        (folder / f"{name}.so").symlink_to(builds / "old" / ARCH / "tiny.so")
    assert compare.main([str(builds / "old"), str(folder.parent)]) == 1
    assert (
        f"different: {ARCH}/more: \n    only the new build has this module"
        in capsys.readouterr().out
    )
    with pytest.raises(SystemExit, match="sm80 holds no modules"):
        compare.main([str(builds / "old"), str(builds / "old"), "--arch", "sm80"])


def test_a_build_of_other_sources_is_reported(tmp_path: Path) -> None:
    plan = Plan.load(ROOT)
    specs = plan.modules("core", plan.archs("9.0a"))[:2]
    rows = [
        {
            "name": spec.name,
            "arch": spec.arch.name,
            "file": spec.file_name,
            "fingerprint": spec.fingerprint,
        }
        for spec in specs
    ]
    assert told(tmp_path, rows) == []
    rows[1]["fingerprint"] = "0" * 64
    assert told(tmp_path, rows) == [specs[1].file_name]


def told(folder: Path, rows: list[dict[str, str]]) -> list[str]:
    rest = {"size": 1, "sha256": "0" * 64, "exports": [], "sass": [], "needed": []}
    head = {
        "schema": MANIFEST_SCHEMA,
        "distribution": "precast.aot",
        "version": "0",
        "cuda_major": 13,
        "toolkit": "13.0",
        "min_driver": "580",
        "machine": "x86_64",
        "tvm_ffi_built": "0.1.15",
        "tvm_ffi_min": "0.1.15",
        "tvm_ffi_max_exclusive": "0.2",
        "modules": [{**row, **rest} for row in rows],
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(head))
    return compare.outdated(folder, ARCH)


def test_the_committed_map_is_legal_and_a_wrong_one_is_rejected(tmp_path: Path) -> None:
    compare.NameMap.load(ROOT / "ci" / "kernel_names.toml")
    path = tmp_path / "names.toml"
    path.write_text("[identifier]\n")
    with pytest.raises(ValueError, match="unknown tables identifier"):
        compare.NameMap.load(path)
    path.write_text("[[exceptions]]\nkernels = 'x'\n")
    with pytest.raises(ValueError, match=r"\[\[exceptions\]\] needs kernels and reason"):
        compare.NameMap.load(path)


def test_identifiers_are_renamed_whole_and_can_be_exchanged() -> None:
    names = compare.NameMap(identifiers={"Row": "Rows", "Rows": "Row"})
    assert names.new_name("void f<Row, Rows, RowOp>()") == "void f<Rows, Row, RowOp>()"
