# SPDX-License-Identifier: Apache-2.0
"""A kernel for tensor cores that ptxas makes slow does not build, by JIT or by CMake."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from build_support import PLAN, ROOT, Built, configure, run

from precast._jit import compiler
from precast._jit.commands import Command, build_commands
from precast._jit.toolchain import find_toolchain
from precast._plan.planner import Plan
from precast.errors import CompileError

OP = "attention_sm90"
AXES = {"dtype_q": "bf16", "dtype_kv": "bf16", "head_dim_qk": 64, "head_dim_vo": 64}
KIT = "include/precast/core/sm90/warpgroup.cuh"
LAUNCHER = "include/precast/attention/sm90/attention.cuh"
#: The module has two kernels. One of them is enough to be refused, and takes half of the time.
BOTH = """\
  return is_plain(p) ? launch_sm90_roles<Plain>(p, enable_pdl, stream)
                     : launch_sm90_roles<General>(p, enable_pdl, stream);
"""
ONE = """\
  return launch_sm90_roles<Plain>(p, enable_pdl, stream);
"""
FENCE = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
INCREASE = 'asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount'

#: A change of KIT, and what ptxas says then.
SLOW = {
    "fences are missing": (FENCE, "", ["(C7519) warpgroup.arrive is injected"]),
    "registers do not suffice": (
        INCREASE,
        f"{INCREASE} - 56",
        ["(C7512)", "ptxas error   : Registers are spilled"],
    ),
}

#: A kernel without notes.
SPILLS = """
__global__ void LocalKernel(float* out, int count, int i) {
  float x[64];
  for (int k = 0; k < 64; ++k) x[k] = out[k];
  for (int k = 0; k < count; ++k) x[(k * i) % 64] += 1.0f;
  for (int k = 0; k < 64; ++k) out[k] = x[k];
}
"""


def change(root: Path, old: str, new: str) -> None:
    """Change the kit in a copy of the sources, in which the module has one kernel."""
    for file, before, after in ((KIT, old, new), (LAUNCHER, BOTH, ONE)):
        text = (root / file).read_text()
        assert text.count(before) == 1
        (root / file).write_text(text.replace(before, after))


def compile_kernel(root: Path, folder: Path) -> None:
    """Compile the kernel of the module as JIT does, without its binding."""
    toolchain = find_toolchain()
    spec = Plan.load(root).spec(OP, AXES, "9.0a", toolchain.toolkit.major)
    commands = build_commands(spec, toolchain, folder)
    compiler.run([command for command in commands if command.kind == "cuda"], folder, spec.name)


def test_the_kernel_as_it_is_builds(built: Built) -> None:
    """What the other tests change is a module of the profile ``ci``, built with the same flags."""
    spec = PLAN.spec(OP, AXES, "9.0a", built.toolchain.toolkit.major)
    (row,) = [row for row in built.manifest.modules if row.file == spec.file_name]
    assert row.fingerprint == spec.fingerprint


@pytest.mark.parametrize("what", SLOW)
def test_jit_refuses_a_slow_one(what: str, tree: Path, tmp_path: Path) -> None:
    old, new, words = SLOW[what]
    change(tree, old, new)
    with pytest.raises(CompileError) as caught:
        compile_kernel(tree, tmp_path)
    text = str(caught.value)
    assert f"compiling {Plan.load(ROOT).spec(OP, AXES, '9.0a').name} failed" in text
    assert "error: attention_sm90.cu.o: ptxas serialises or delays wgmma" in text
    assert all(word in text for word in words), text


def test_local_memory_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "local.cu").write_text(SPILLS)
    (flags,) = Plan.load(ROOT).config.op(OP).cuda_flags
    argv = [*find_toolchain().nvcc_command(), "-arch=sm_90a", flags, "-cubin", "local.cu"]
    command = Command("cuda", [*argv, "-o", "local.cubin"], tmp_path / "local.cubin")
    with pytest.raises(CompileError) as caught:
        compiler.run([command], tmp_path, "local")
    text = str(caught.value)
    assert "error: local.cubin: a kernel needs local memory" in text
    assert "ptxas error   : Local memory used for function" in text


def test_cmake_refuses_a_slow_one(tree: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "python", tree / "python", ignore=ignored, dirs_exist_ok=True)
    folder = tmp_path / "build"
    configure(folder, source=tree, PRECAST_PROFILE="ci", PRECAST_CUDA_ARCH_LIST="9.0a")
    name = Plan.load(ROOT).spec(OP, AXES, "9.0a").name
    kernel = f"CMakeFiles/sm90a-{name}.dir/csrc/attention/attention_sm90.cu.o"
    change(tree, FENCE, "")
    text = run(["ninja", "-C", folder, kernel], fails=True)
    assert f"error: {kernel}: ptxas serialises or delays wgmma" in text
    assert "(C7519) warpgroup.arrive is injected" in text
