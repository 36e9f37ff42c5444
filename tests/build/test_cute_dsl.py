# SPDX-License-Identifier: Apache-2.0
"""Kernels in CuTe DSL become modules like any other: the walkthrough, and what must not pass."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_support import ROOT
from hostile_environment import hostile_environment

from precast._jit import cute_dsl
from precast._jit.commands import build_commands
from precast._jit.toolchain import find_toolchain
from precast._plan.places import SOURCE_FOLDERS
from precast._plan.planner import Plan
from precast._plan.spec import ModuleSpec
from precast._runtime import aot, elf
from precast._runtime.library import get_function, load_library
from precast._runtime.manifest import MANIFEST_NAME
from precast.errors import CompileError

PLAN = Plan.load(ROOT)
OPS = [
    op for op, config in PLAN.config.ops.items() if any(s.endswith(".py") for s in config.sources)
]
#: CUDA's runtime serves what a launch needs; nothing of CuTe DSL is left.
RUNTIME = {
    "cudaLaunchKernelExC",
    "cudaLibraryGetKernel",
    "cudaLibraryLoadData",
    "cudaThreadExchangeStreamCaptureMode",
}


def _spec(op: str, target: str, major: int | None = None) -> ModuleSpec:
    """The module of the profile ``ci``."""
    major = find_toolchain().toolkit.major if major is None else major
    return next(s for s in PLAN.modules("ci", [PLAN.arch(target)], major) if s.op == op)


pytestmark = pytest.mark.skipif(
    cute_dsl.problem(_spec(OPS[0], "sm90a", 13)) is not None,
    reason="no CuTe DSL of the version of build.toml: its modules are not built here",
)


def _walkthrough() -> dict[str, str]:
    """The files of the made-up op that CONTRIBUTING.md shows."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```\w+ new=(\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def _add_shift(tree: Path) -> Path:
    for name, code in _walkthrough().items():
        assert not (tree / name).exists()
        (tree / name).write_text(code, encoding="utf-8")
    return tree


@pytest.fixture
def shift(tree: Path) -> Path:
    """A copy of the sources with the op of the walkthrough."""
    return _add_shift(tree)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of that op for two targets."""
    folder = tmp_path_factory.mktemp("shift")
    for part in SOURCE_FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, folder / "tree" / part, ignore=ignored)
    return _build(_add_shift(folder / "tree"), folder / "out", "sm90a", "sm100f")


def _build(root: Path, out: Path, *archs: str) -> Path:
    plan = Plan.load(root)
    major = find_toolchain().toolkit.major
    aot.build(plan, [plan.spec("shift", {"dtype": "f32"}, arch, major) for arch in archs], out)
    return out


def _fails(root: Path, folder: Path, *changes: tuple[str, str]) -> str:
    """What the compiler of the Python source says alone, which must fail and leave nothing."""
    spec = Plan.load(root).spec("shift", {"dtype": "f32"}, "sm90a")
    commands = build_commands(spec, find_toolchain(), folder)
    (argv,) = (command.argv for command in commands if command.kind == "cute_dsl")
    for old, new in changes:
        argv = [re.sub(old, new, word) for word in argv]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode != 0, done.stdout
    assert not [*folder.glob("*.o")]
    return done.stderr


def _change(root: Path, name: str, old: str, new: str) -> None:
    text = (root / name).read_text(encoding="utf-8")
    assert old in text
    (root / name).write_text(text.replace(old, new, 1), encoding="utf-8")


KERNEL, BINDING = "python/precast/cute_dsl/shift.py", "csrc/elementwise/shift_binding.cc"


def test_the_walkthrough_makes_modules_for_two_targets(modules: Path) -> None:
    assert set(_walkthrough()) == {"aot_configs/shift.toml", KERNEL, BINDING}
    for arch, sass in (("sm90a", "sm_90a"), ("sm100f", "sm_100f")):
        library = modules / arch / "shift__dtype_f32.so"
        assert elf.read_machine_code(library) == ((sass,), ())
        (kernel,) = elf.read_resources(library)
        assert (kernel.stack, kernel.local, kernel.shared) == (0, 0, 0)
        assert elf.read_symbols(library).exports == ("shift",)
        assert _undefined(library) >= RUNTIME
        function = get_function(load_library(library, find_toolchain().toolkit.major), "shift")
        x = torch.ones(8)
        with pytest.raises(ValueError, match="shift: input must be a CUDA tensor, got cpu"):
            function(x, 0.5, x, False)
        assert (x == 1).all()


def _undefined(library: Path) -> set[str]:
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        symbols = [s.name for s in table.iter_symbols() if s["st_shndx"] == "SHN_UNDEF"]
    return {name.partition("@")[0] for name in symbols if name}


def test_nothing_of_cute_dsl_is_needed_or_left(modules: Path) -> None:
    library = modules / "sm90a" / "shift__dtype_f32.so"
    names = _undefined(library)
    # The leading underscore is that of the runtime which an exported object would call.
    assert not {name for name in names if name.startswith(("_cuda", "_cu", "CuteDSL"))}
    assert not any("cute" in name.lower() for name in elf.read_symbols(library).needed)
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'python')!r})\n"
        "from pathlib import Path\n"
        "from precast._runtime.library import load_library\n"
        f"load_library(Path({str(library)!r}), {find_toolchain().toolkit.major})\n"
        "assert not [m for m in sys.modules if m.partition('.')[0] == 'cutlass']\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_place_and_environment_give_the_same_bytes(
    shift: Path, modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "another" / "and a much longer place, too" / "tree"
    shutil.copytree(shift, other, ignore=shutil.ignore_patterns("__pycache__"))
    for name, value in hostile_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    for name in ("CUTE_DSL_ARCH", "CUTE_DSL_LINEINFO", "CUTE_DSL_KEEP"):
        monkeypatch.setenv(name, "1")
    second = _build(other, tmp_path / "second", "sm90a")
    name = Path("sm90a", "shift__dtype_f32.so")
    data = (modules / name).read_bytes()
    assert data == (second / name).read_bytes()
    assert str(tmp_path).encode() not in data


def test_a_binding_with_other_arguments_is_not_linked(shift: Path, tmp_path: Path) -> None:
    _change(shift, BINDING, "int32_t items, float amount);", "int64_t items, float amount);")
    with pytest.raises(CompileError, match=r"undefined reference to .*shift\(.*long, float\)"):
        _build(shift, tmp_path / "out", "sm90a")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def test_what_a_launcher_cannot_pass_is_named(shift: Path, tmp_path: Path) -> None:
    _change(
        shift,
        KERNEL,
        "out: cute.Pointer, items: Int32, amount: Float32) -> None:",
        "out: cute.Pointer, items: Int32, amount: cute.Tensor) -> None:",
    )
    _change(
        shift,
        KERNEL,
        "self.kernel(input, out, items, amount)",
        "self.kernel(input, out, items, cute.make_tensor(input, (items, 4)))",
    )
    _change(shift, KERNEL, "x.load() + amount", "x.load() + amount[0]")
    error = _fails(shift, tmp_path)
    assert re.search(r"shift\.py: error: shift: argument 3 is .*; legal: cute\.Pointer", error)


def test_an_error_of_the_kernel_is_that_of_the_build(shift: Path, tmp_path: Path) -> None:
    _change(shift, KERNEL, "x.load() + amount", "x.load() + amuont")
    assert "amuont" in _fails(shift, tmp_path)


def test_another_version_compiles_nothing(shift: Path, tmp_path: Path) -> None:
    version = Plan.load(shift).build.cute_dsl
    error = _fails(shift, tmp_path, ("^--version=.*", "--version=4.0.0"))
    assert f"error: {cute_dsl.DISTRIBUTION} {version} is installed, not 4.0.0" in error


@pytest.mark.parametrize("op", OPS)
def test_other_targets_build_and_load(op: str, tmp_path: Path) -> None:
    """Those that no GPU of ours runs; tests/load has the profile's."""
    spec = _spec(op, "sm100f")
    aot.build(PLAN, [spec], tmp_path)
    kernels = elf.read_resources(tmp_path / spec.file_name)
    assert kernels and all((kernel.stack, kernel.local) == (0, 0) for kernel in kernels)
    load_library(tmp_path / spec.file_name, spec.cuda_major)
