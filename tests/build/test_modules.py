# SPDX-License-Identifier: Apache-2.0
"""What CMake built is what was planned, and a build that is not so fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from build_support import CI_MODULES, PLAN, ROOT, Built, configure, run, spec_of

from precast import aot
from precast._base.driver import device_capabilities
from precast._jit.commands import build_commands
from precast._jit.plan_files import target_archs
from precast._plan.includes import include_closure
from precast._runtime import elf
from precast._runtime.library import get_function, load_library
from precast._runtime.manifest import MANIFEST_NAME, read_manifest
from precast._runtime.manifest_writer import SECONDS_NAME, write_manifest
from precast.errors import ProviderError

ELEMENTWISE = ("activation__", "scale__")
ELEMENTWISE_BYTES = 150 * 1024
ATTENTION_BYTES = 4 << 20
ATTENTION_FAMILY_BYTES = 40 << 20  # of the profile core, for one architecture
ATTENTION_SECONDS = 45

#: Bytes of stack that a kernel may use, where its launch bounds leave no registers; 0 for others.
STACKS = {
    "TopKKernel": 32,
    "ChainSpeculativeKernel": 32,
    "TopKTopPSampleKernel": 128,
    "FusedSampleKernel": 768,
}


def _write(built: Built, root: Path) -> None:
    write_manifest(root, PLAN, built.specs, distribution="test", toolkit="13.0")


@pytest.fixture
def copy(built: Built, tmp_path: Path) -> Path:
    """A copy of the provider, to be spoilt; its manifest is gone."""
    root = tmp_path / "provider"
    shutil.copytree(built.provider, root)
    (root / MANIFEST_NAME).unlink()
    return root


def test_every_planned_module_is_installed(built: Built) -> None:
    there = {p.relative_to(built.provider).as_posix() for p in built.provider.rglob("*.so")}
    assert there == set(CI_MODULES)
    assert [row.file for row in built.manifest.modules] == CI_MODULES


@pytest.mark.parametrize("file_name", CI_MODULES)
def test_manifest_row(built: Built, file_name: str) -> None:
    spec = spec_of(built, file_name)
    row = next(row for row in built.manifest.modules if row.file == file_name)
    assert row.fingerprint == spec.fingerprint
    assert row.sass == (spec.arch.sass,)
    assert set(row.exports) == set(spec.exports)
    assert row.size == built.library(spec).stat().st_size
    # Beside others, the compiler of CuTe DSL takes a minute.
    most = 180 if spec.is_cute_dsl else 60
    assert 0.1 < json.loads((built.tree / SECONDS_NAME).read_text())[file_name] < most


@pytest.mark.parametrize("file_name", CI_MODULES)
def test_no_kernel_uses_more_local_memory_than_it_must(built: Built, file_name: str) -> None:
    kernels = list(elf.read_resources(built.library(spec_of(built, file_name))))
    assert kernels
    spilling = [k for k in kernels if k.local or k.stack > _stack_limit(k.kernel)]
    assert not spilling


def _stack_limit(kernel: str) -> int:
    return max((limit for name, limit in STACKS.items() if name in kernel), default=0)


@pytest.mark.parametrize(
    "file_name", [name for name in CI_MODULES if Path(name).name.startswith(ELEMENTWISE)]
)
def test_elementwise_modules_are_small(built: Built, file_name: str) -> None:
    assert (built.provider / file_name).stat().st_size <= ELEMENTWISE_BYTES


@pytest.mark.parametrize(
    "file_name", [name for name in CI_MODULES if Path(name).name.startswith("attention__")]
)
def test_attention_is_small_and_compiles_soon(built: Built, file_name: str) -> None:
    """The module that CI builds is as large as any: others are to be at most twice that."""
    size = (built.provider / file_name).stat().st_size
    assert 2 * size <= ATTENTION_BYTES
    planned = [axes for op, axes in PLAN.aot_axes("core") if op == "attention"]
    assert planned
    assert len(planned) * 2 * size <= ATTENTION_FAMILY_BYTES
    assert json.loads((built.tree / SECONDS_NAME).read_text())[file_name] <= ATTENTION_SECONDS


def test_include_scan_finds_what_the_compilers_read(built: Built) -> None:
    """Ninja kept what the compilers reported with -MD."""
    read: dict[str, set[Path]] = {}
    target = ""
    for line in run(["ninja", "-C", built.tree, "-t", "deps"]).splitlines():
        if line.startswith(" "):
            path = Path(line.strip())
            if path.is_relative_to(ROOT / "include") or path.is_relative_to(ROOT / "csrc"):
                read[target].add(path)
        elif ":" in line:
            target = line.partition(":")[0]
            read[target] = set()
    for spec in built.specs:
        for source in spec.sources:
            if source.endswith(".py"):  # Ninja gets what the scan found.
                continue
            scanned = set(include_closure([spec.source_path(source)], spec.include_folders))
            objects = [name for name in read if name.endswith(f"/{source}.o")]
            assert objects
            for name in objects:
                assert read[name] <= scanned
                assert len(read[name]) > 2


@pytest.fixture(scope="module")
def targets(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A provider with one small module for every target."""
    folder = tmp_path_factory.mktemp("targets")
    major = built.toolchain.toolkit.major
    archs = [a for a in PLAN.build.archs.values() if a.cuda <= built.toolchain.toolkit.version]
    smallest = next(spec for spec in built.specs if spec.op == "scale")
    aot.build(PLAN, [PLAN.spec(smallest.op, smallest.axes, arch, major) for arch in archs], folder)
    return folder


def test_every_target_is_compiled_and_read_back(built: Built, targets: Path) -> None:
    """Family targets, too, whose code is easily taken for that of the plain architecture."""
    known = built.toolchain.toolkit.version
    rows = read_manifest(targets).modules
    assert [row.sass for row in rows] == [
        (arch.sass,) for arch in PLAN.build.archs.values() if arch.cuda <= known
    ]
    assert "sm_100f" in {row.sass[0] for row in rows}


def test_modules_of_all_targets_live_in_one_process(built: Built, targets: Path) -> None:
    """Copies of one op for several targets share no template static."""
    rows = read_manifest(targets).modules
    functions = [
        get_function(load_library(targets / row.file, built.toolchain.toolkit.major), "scale")
        for row in rows
    ]
    assert len({id(function) for function in functions}) == len(rows) > 2
    maps = Path("/proc/self/maps").read_text()
    assert all(str(targets / row.file) in maps for row in rows)


def test_missing_module_fails(built: Built, copy: Path) -> None:
    (copy / "sm90a" / "scale__dtype_f32.so").unlink()
    with pytest.raises(ProviderError, match=r"sm90a/scale__dtype_f32\.so: missing"):
        _write(built, copy)
    assert not (copy / MANIFEST_NAME).exists()


def test_unplanned_module_fails(built: Built, copy: Path) -> None:
    shutil.copy(copy / "sm90a" / "scale__dtype_f32.so", copy / "sm90a" / "scale__dtype_u8.so")
    with pytest.raises(ProviderError, match=r"sm90a/scale__dtype_u8\.so: not planned"):
        _write(built, copy)


def test_module_of_another_target_fails(built: Built, copy: Path, targets: Path) -> None:
    shutil.copy(targets / "sm80" / "scale__dtype_f32.so", copy / "sm90a" / "scale__dtype_f32.so")
    with pytest.raises(ProviderError, match="has machine code for sm_80; planned: sm_90a"):
        _write(built, copy)


def test_module_with_ptx_fails(built: Built, copy: Path, tmp_path: Path) -> None:
    spec = spec_of(built, "sm90a/scale__dtype_f32.so")
    *compiles, link = build_commands(spec, built.toolchain, tmp_path)
    for command in compiles:
        argv = [w.replace("code=sm_90a", "code=[sm_90a,compute_90a]") for w in command.argv]
        run(["env", "-C", tmp_path, *argv])
    run(link.argv)
    shutil.copy(link.output, copy / spec.file_name)
    with pytest.raises(ProviderError, match=r"sm90a/scale.*has PTX for sm_90a"):
        _write(built, copy)


def test_library_of_another_kind_fails(built: Built, copy: Path, tmp_path: Path) -> None:
    source = tmp_path / "other.cc"
    source.write_text('extern "C" int leaked() { return 1; }\n')
    target = copy / "sm90a" / "scale__dtype_f32.so"
    compiler = built.toolchain.host_compiler
    run([compiler, "-shared", "-fPIC", "-Wl,-rpath,/nowhere", source, "-o", target])
    with pytest.raises(ProviderError) as error:
        _write(built, copy)
    text = str(error.value)
    assert "sm90a/scale__dtype_f32.so: exports nothing; planned: scale" in text
    assert "has machine code for nothing; planned: sm_90a" in text
    assert "has other public symbols leaked; planned: none" in text
    assert "has an RPATH /nowhere" in text


def test_text_instead_of_a_library_fails(built: Built, copy: Path) -> None:
    (copy / "sm90a" / "scale__dtype_f32.so").write_text("not a library")
    with pytest.raises(ProviderError, match=r"scale__dtype_f32\.so is not a shared library"):
        _write(built, copy)


def test_foreign_library_is_not_allowed(built: Built) -> None:
    from precast._runtime.manifest_writer import module_problems

    spec = built.specs[0]
    path = built.library(spec)
    symbols, code = elf.read_symbols(path), elf.read_machine_code(path)
    assert module_problems(symbols, code, spec.exports, spec.arch.sass, spec.cudart) == []
    needy = symbols._replace(needed=("libcuda.so.1", "libtorch.so", *symbols.needed))
    (problem,) = module_problems(needy, code, spec.exports, spec.arch.sass, spec.cudart)
    assert problem == "needs other libraries libcuda.so.1, libtorch.so; planned: none"
    unique = symbols._replace(unique=("_ZZ1fvE1x",))
    assert module_problems(unique, code, spec.exports, spec.arch.sass, spec.cudart)


def test_nothing_to_build_for_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("precast._jit.plan_files.device_capabilities", list)
    with pytest.raises(ValueError, match=r'PRECAST_CUDA_ARCH_LIST="8\.0 9\.0a"'):
        target_archs(PLAN, "")
    if not device_capabilities():
        out = configure(tmp_path, fails=True)
        assert "no targets to build for" in " ".join(out.split())


def test_wrong_settings_are_errors_of_cmake(tmp_path: Path) -> None:
    out = configure(tmp_path, fails=True, PRECAST_CUDA_ARCH_LIST="9.0q")
    assert "'9.0q' is not a CUDA target" in " ".join(out.split())
    out = configure(
        tmp_path, fails=True, PRECAST_CUDA_ARCH_LIST="9.0a", PRECAST_PROFILE="everything"
    )
    assert "unknown profile 'everything'; legal: ci, core, full" in " ".join(out.split())
    out = configure(tmp_path, fails=True, PRECAST_MODE="other")
    assert "legal: core, modules" in " ".join(out.split())
