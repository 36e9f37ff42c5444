# SPDX-License-Identifier: Apache-2.0
"""Kernels in CuTe DSL in the planner and in builds, with and without their compiler."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from precast._jit import compiler, cute_dsl, plan_files
from precast._jit.commands import build_commands
from precast._jit.toolchain import find_toolchain
from precast._plan.places import CUTE_DSL_FOLDER, checkout_root
from precast._plan.planner import Plan
from precast._plan.spec import ModuleSpec
from precast._runtime import aot, jit_fallback
from precast.cli import build as cli_build
from precast.errors import ConfigError, ToolchainError

ROOT = checkout_root()
assert ROOT is not None
PLAN = Plan.load(ROOT)
OP, SCALE = "moe_activation_cute_dsl", "scale"
REQUIRED = f"nvidia-cutlass-dsl=={PLAN.build.cute_dsl}"
FIX = f'Fix: pip install "{REQUIRED}"'


def spec(root: Path = ROOT, op: str = OP, dtype: str = "bf16") -> ModuleSpec:
    return Plan.load(root).spec(op, {"dtype": dtype}, "sm90a", 13)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_dsl, "_installed", lambda: None)


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_dsl, "_installed", lambda: PLAN.build.cute_dsl)


# -- the plan -------------------------------------------------------------------------------------


def _append(path: Path) -> None:
    with path.open("a") as out:
        out.write("\n# changed\n")


@pytest.mark.parametrize(
    "file",
    [
        f"{CUTE_DSL_FOLDER}/moe_activation.py",
        f"{CUTE_DSL_FOLDER}/common.py",
        f"{CUTE_DSL_FOLDER}/_compile.py",
        "csrc/core/cute_kernel.h",
        "csrc/moe/moe_activation_cute_dsl_binding.cc",
        "csrc/moe/moe_activation_call.h",
    ],
)
def test_the_fingerprint_covers_what_it_is_compiled_from(tree: Path, file: str) -> None:
    before, scale = spec(tree).fingerprint, spec(tree, SCALE, "f32").fingerprint
    _append(tree / file)
    assert spec(tree).fingerprint != before
    assert spec(tree, SCALE, "f32").fingerprint == scale


def test_the_fingerprint_has_the_version_of_the_compiler(tree: Path) -> None:
    before, scale = spec(tree).fingerprint, spec(tree, SCALE, "f32").fingerprint
    path = tree / "aot_configs" / "build.toml"
    path.write_text(path.read_text().replace(PLAN.build.cute_dsl, "9.9.9"))
    assert spec(tree).canonical()["cute_dsl"] == "9.9.9"
    assert spec(tree).fingerprint != before
    assert spec(tree, SCALE, "f32").fingerprint == scale


def test_another_kernel_changes_nothing(tree: Path) -> None:
    before = spec(tree).fingerprint
    _append(tree / CUTE_DSL_FOLDER / "moe_finalize.py")
    assert spec(tree).fingerprint == before


def test_a_source_in_python_is_a_kernel_of_the_folder(tree: Path) -> None:
    path = tree / "aot_configs" / f"{OP}.toml"
    text = path.read_text()
    (tree / "csrc" / "kernel.py").write_text("")
    for name, words in (
        ("csrc/kernel.py", f"is no kernel in CuTe DSL; legal: files of {CUTE_DSL_FOLDER}/"),
        (f"{CUTE_DSL_FOLDER}/none.py", "none.py' does not exist; legal: .*cute_dsl/moe_finalize"),
    ):
        path.write_text(text.replace(f"{CUTE_DSL_FOLDER}/moe_activation.py", name))
        with pytest.raises(ConfigError, match=words):
            Plan.load(tree)


def test_the_version_is_the_same_everywhere() -> None:
    if sys.version_info < (3, 11):
        import tomli as tomllib
    else:
        import tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["tool"]["dynamic-metadata"][0]["optional-dependencies"]
    assert REQUIRED in extras["build"]
    assert not [text for name in ("jit", "cli") for text in extras[name] if "cutlass" in text]
    assert not [t for t in project["tool"]["dynamic-metadata"][0]["dependencies"] if "cutlass" in t]
    pins = (ROOT / "ci" / "build-constraints.txt").read_text()
    found = re.findall(r"^nvidia-cutlass-dsl[\w-]*==(\S+)$", pins, re.MULTILINE)
    assert found and set(found) == {PLAN.build.cute_dsl}


def test_wheels_of_modules_require_it_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "python" / "precast_jit_cache"))
    import precast_metadata

    monkeypatch.setenv("PRECAST_PROFILE", "core")
    for archs, wanted in (("9.0a", [REQUIRED]), ("8.0 10.0f", [REQUIRED]), ("8.0", [])):
        monkeypatch.setenv("PRECAST_CUDA_ARCH_LIST", archs)
        requires = precast_metadata.Modules().get_requires_for_dynamic_metadata({})
        assert [text for text in requires if "cutlass" in text] == wanted


# -- where the compiler is missing ----------------------------------------------------------------


@pytest.mark.usefixtures("missing")
def test_a_build_of_many_leaves_them_out_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[ModuleSpec] = []
    monkeypatch.setattr(aot, "_build", lambda plan, specs, *others: built.extend(specs))
    aot.build(PLAN, [spec(), spec(op=SCALE, dtype="f32")], tmp_path)
    assert [s.op for s in built] == [SCALE]
    (line,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert line.startswith("1 module is left out of this build, because kernels in CuTe DSL need")
    assert f"{REQUIRED}, which is not installed: sm90a/{OP}__dtype_bf16.so. {FIX}" in line


@pytest.mark.usefixtures("missing")
def test_a_build_of_nothing_else_fails(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=re.escape(FIX)):
        aot.build(PLAN, [spec()], tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("missing")
def test_the_command_line_lists_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    cli_build.add_arguments(parser)
    words = ["--profile", "ci", "--arch", "9.0a", "--out-dir", str(tmp_path), "--dry-run", "--json"]
    assert cli_build.run(parser.parse_args(words)) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert f"sm90a/{OP}__dtype_bf16.so" in report["left_out"]
    assert not [row for row in report["modules"] if "cute_dsl" in row["file"]]
    assert "left out of this build" in err and FIX in err


@pytest.mark.usefixtures("missing")
def test_cmake_gets_the_others_and_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.cmake"
    words = ["cmake", "--root", ROOT, "--out", out, "--profile", "ci", "--archs", "9.0a"]
    assert plan_files.main(list(map(str, words))) == 0
    assert "cute_dsl" not in out.read_text()
    assert f"[==[{SCALE}__dtype_f32]==]" in out.read_text()
    assert "left out of this build" in capsys.readouterr().err


@pytest.mark.usefixtures("missing")
def test_jit_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRECAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "find_toolchain", lambda *_: find_toolchain())
    with pytest.raises(ToolchainError, match=f"{OP}__dtype_bf16 for sm90a cannot be") as caught:
        compiler.build(spec(), "why")
    assert "is not installed" in str(caught.value) and FIX in str(caught.value)
    step = jit_fallback._toolchain_step(spec())
    assert not step.accepted and FIX in step.reason


def test_another_version_is_like_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_dsl, "_installed", lambda: "1.2.3")
    problem = cute_dsl.problem(spec())
    assert problem is not None
    assert "nvidia-cutlass-dsl 1.2.3 is installed, which is another" in problem
    assert "installed as 1.2.3" in cute_dsl.statement([spec()])
    assert cute_dsl.problem(spec(op=SCALE, dtype="f32")) is None


# -- where it is installed ------------------------------------------------------------------------


@pytest.mark.usefixtures("present")
def test_commands_compile_the_source_and_link_it_behind_the_binding(tmp_path: Path) -> None:
    kernel, binding, link = build_commands(spec(), find_toolchain(), tmp_path)
    assert (kernel.kind, binding.kind, link.kind) == ("cute_dsl", "host", "link")
    assert kernel.argv[:2] == [sys.executable, "-I"]
    flags = {"--arch=sm_90a", f"--version={PLAN.build.cute_dsl}", "--axis=dtype=bf16"}
    assert flags <= {*kernel.argv}
    compiler_of_host = kernel.argv[kernel.argv.index("--") + 1 :]
    assert compiler_of_host[: 1 + len(spec().host_flags)] == [
        str(find_toolchain().host_compiler),
        *spec().host_flags,
    ]
    assert link.argv.index(str(binding.output)) < link.argv.index(str(kernel.output))
    assert cute_dsl.buildable([spec()]) == ([spec()], [])


def test_cmake_gets_the_flags_of_jit(present: None, tmp_path: Path) -> None:
    text = plan_files.cmake_rows([spec()])
    for word in spec().compile_flags(".py"):
        assert f"[==[{word}]==]" in text
    assert f"PYTHON_SOURCES [==[{CUTE_DSL_FOLDER}/moe_activation.py]==]" in text
    assert f"[==[{ROOT / CUTE_DSL_FOLDER / 'common.py'}]==]" in text  # what the object depends on


# -- what the compile reads -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    path = ROOT / CUTE_DSL_FOLDER / "_compile.py"
    found = importlib.util.spec_from_file_location("cute_dsl_compile", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # NamedTuple looks its module up.
    found.loader.exec_module(module)
    return module


PTX = """
.visible .entry kernel_k(
	.param .u64 .ptr .global .align 16 kernel_k_param_0,
	.param .u32 kernel_k_param_1,
	.param .u64 kernel_k_param_2,
	.param .f32 kernel_k_param_3,
	.param .align 64 .b8 kernel_k_param_4[128]
)
.reqntid 192, 1, 1
.minnctapersm 5
{
	ret;
}
"""


def test_the_launcher_has_the_types_of_the_kernel(driver: ModuleType) -> None:
    kernel = driver.read_ptx("scale", PTX, b"")
    assert kernel.arguments == ["const void*", "int32_t", "int64_t", "float", "const TensorMap&"]
    assert (kernel.entry, kernel.threads) == ("kernel_k", 192)
    code = driver.launchers("a.py", [kernel], [Path("0.fatbin")], {"dtype": "bf16", "topk": "8"})
    assert (
        "cudaError_t scale(uint32_t ctas, bool enable_pdl, cudaStream_t stream, const void* a0, "
        "int32_t a1, int64_t a2, float a3, const TensorMap& a4) {" in code
    )
    assert "extern const DType scale_dtype = DType::bf16;" in code
    assert "extern const int scale_topk = 8;" in code
    assert "extern const int scale_threads = 192;" in code
    assert 'kernel(precast_code_of_scale, "kernel_k", 192, 0, 1);' in code


def test_the_launcher_passes_shared_memory_and_clusters(driver: ModuleType) -> None:
    shared = PTX.replace(".visible", ".extern .shared .align 16 .b8 s[];\n.visible")
    kernel = driver.read_ptx("scale", shared, b"", shared_bytes=65536, cluster=2)
    code = driver.launchers("a.py", [kernel], [Path("0.fatbin")], {})
    assert 'kernel(precast_code_of_scale, "kernel_k", 192, 65536, 2);' in code
    with pytest.raises(ValueError, match="scale must take dynamic shared memory if"):
        driver.read_ptx("scale", PTX, b"", shared_bytes=4)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (".param .u32 ", ".param .align 8 .b8 x[24] ", "argument 1 is .*; legal: cute.Pointer"),
        (".reqntid 192, 1, 1", ".maxntid 192", "one-dimensional block of constant size"),
        (".reqntid 192, 1, 1", ".reqntid 32, 4, 1", "one-dimensional block of constant size"),
        (".visible", ".extern .shared .align 16 .b8 s[];\n.visible", "dynamic shared memory"),
        (".visible .entry", ".visible .func", "has 0 kernels"),
    ],
)
def test_what_no_launcher_passes_is_refused(
    driver: ModuleType, old: str, new: str, words: str
) -> None:
    with pytest.raises(ValueError, match=f"scale.* {words}"):
        driver.read_ptx("scale", PTX.replace(old, new, 1), b"")
