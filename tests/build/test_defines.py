# SPDX-License-Identifier: Apache-2.0
"""A kernel source that is compiled without one of its defines, or with a wrong one, says so."""

from __future__ import annotations

import pytest
from build_support import OPS, PLAN, run, some

from precast._jit.commands import location_flags
from precast._jit.toolchain import find_toolchain


def _has_cute_dsl(op: str) -> bool:
    return any(source.endswith(".py") for source in PLAN.config.op(op).sources)


CASES = [
    (op, source, define)
    for op in OPS
    for source in PLAN.config.op(op).sources
    if source.endswith(".cu")
    # What is compiled beside kernels in CuTe DSL has no kernels, which alone depend on defines.
    if not _has_cute_dsl(op)
    for define in ["PRECAST_SM", *(f"PRECAST_{axis.upper()}" for axis in PLAN.config.op(op).axes)]
]

VALUES = [case for case in CASES if case[2] != "PRECAST_SM"]


def _compile(op: str, source: str, without: str, *instead: str) -> str:
    _, axes = next(row for row in PLAN.aot_axes() if row[0] == op)
    toolchain = find_toolchain()
    spec = PLAN.spec(op, axes, "sm90a", toolchain.toolkit.major)
    flags = [f for f in spec.compile_flags(source) if not f.startswith(f"-D{without}=")]
    command = [*toolchain.nvcc_command(), *flags, *instead, *location_flags(spec, source)]
    return run([*command, "-ptx", "-o", "/dev/null", spec.source_path(source)], fails=True)


@pytest.mark.parametrize(("op", "source", "define"), some(CASES, 9))
def test_missing_define_is_an_error(op: str, source: str, define: str) -> None:
    out = _compile(op, source, define)
    errors = [line for line in out.splitlines() if "#error" in line or "error:" in line]
    assert any(define in line for line in errors), out


@pytest.mark.parametrize(("op", "source", "define"), some(VALUES, 9))
def test_unknown_value_is_an_error(op: str, source: str, define: str) -> None:
    assert "bogus7" in _compile(op, source, define, f"-D{define}=bogus7")
