# SPDX-License-Identifier: Apache-2.0
"""The primitives of ``include/precast/core/sm90/``: what uses them, and what tests them."""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path

import pytest
import sm90_kit
from build_support import EVERYTHING, OPS, PLAN, ROOT, quick, run

from precast._jit.commands import location_flags
from precast._jit.toolchain import find_toolchain
from precast._plan import wgmma
from precast._plan.includes import include_closure
from precast._plan.spec import ModuleSpec

sys.path.append(str(ROOT / "benchmarks"))
import _micro

HEADER = ROOT / "include/precast/core/sm90/wgmma.cuh"
#: Whether D is added to, or the register that says so; columns, type, and what starts operand A:
#: registers or a descriptor.
INSTRUCTION = re.compile(
    r"setp\.ne\.u32 p, ([01]|%r\d+), 0;\s*"
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(?:16|32)\.f32\.(\w+)\.\3"
    r"\s*\{[^}]*\},\s*(\{|%)"
)


def users() -> list[ModuleSpec]:
    """Every module that may use wgmma, whether it is prebuilt or not.

    Those that convert caches come last, because they have the instances of those that need not.
    """
    specs = []
    for op in OPS:
        for axes in PLAN.config.op(op).space.points():
            spec = PLAN.spec(op, axes, PLAN.config.op(op).archs[0], find_toolchain().toolkit.major)
            if HEADER not in include_closure(
                [spec.source_path(source) for source in spec.sources], spec.include_folders
            ):
                break
            specs.append(spec)
    return sorted(specs, key=lambda spec: spec.axes.get("dtype_kv") == "e4m3")


def instructions(spec: ModuleSpec, folder: Path) -> set[tuple[str, str, int, str]]:
    """Forms, columns and type of every wgmma in the PTX of a module."""
    found = set()
    toolchain = find_toolchain()
    for source in spec.sources:
        if source.endswith(".cu"):
            ptx = folder / "kernel.ptx"
            flags = [*spec.compile_flags(source), *location_flags(spec, source)]
            flags += toolchain.include_flags(True, spec.ffi_in_cuda)
            # Which instances there are does not depend on how well the rest is optimised.
            flags += quick(toolchain)
            run([*toolchain.nvcc_command(), *flags, "-ptx", "-o", ptx, spec.source_path(source)])
            text = ptx.read_text()
            rows = INSTRUCTION.findall(text)
            assert len(rows) == text.count("wgmma.mma_async.sync")
            for added, columns, dtype, start in rows:
                how = {"0": "new", "1": "add"}.get(added, "either")
                form = "rs" if start == "{" else "ss"
                found.add((how, form, int(columns), dtype))
    return found


def test_every_instance_of_the_table_is_used(tmp_path: Path) -> None:
    """Fix: take what no kernel uses out of ``python/precast/_plan/wgmma.py``; ``make generate``.

    Of FP8 the micro-benchmarks measure what kernels choose from. Each run looks at one type, the
    nightly run at all of them.
    """
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    dtypes = [*wgmma.COLUMNS] if EVERYTHING else [random.Random(seed).choice([*wgmma.COLUMNS])]
    missing = {
        (*form, columns, dtype)
        for dtype in dtypes
        for form, row in wgmma.COLUMNS[dtype].items()
        for columns in row
    }
    assert missing
    if "e4m3" in dtypes:
        missing -= {form for form in instructions(_micro.spec(), tmp_path) if form[3] == "e4m3"}
    for spec in users():
        # A module that can have nothing new need not be compiled: the test is whether all are used.
        of_weights = "bf16" if spec.op.startswith(("mxfp4", "int4")) else "e4m3"
        dtype = spec.axes.get("dtype_q") or spec.axes.get("dtype", of_weights)
        if EVERYTHING or any(form[3] == dtype for form in missing):
            missing -= instructions(spec, tmp_path)
    assert not missing


#: The optimised code of the micro-benchmarks is compiled at night; above, all of them become PTX.
KITS = [sm90_kit.kit_spec, sm90_kit.stuck_spec, *([_micro.spec] if EVERYTHING else [])]


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("make", KITS)
def test_the_kernels_that_test_and_measure_each_primitive_compile(make) -> None:
    """Those of ``test_gpu_sm90_kit.py`` and of ``benchmarks/micro/``, without notes of ptxas."""
    assert make().build("this is a test").is_file()
