# SPDX-License-Identifier: Apache-2.0
"""The CUDA major that JIT compiles for, and those whose builds it may load."""

from __future__ import annotations

from precast._base.driver import driver_cuda_version
from precast._base.errors import ToolchainError
from precast._jit import toolchain
from precast._plan.config import Arch
from precast._plan.planner import Plan


def jit_cuda_major(plan: Plan, arch: Arch) -> int:
    """The CUDA major that a compile for ``arch`` would have; without a compiler, the driver's."""
    try:
        return toolchain.find_toolkit(arch).major
    except ToolchainError:
        return driver_cuda_major(plan)


def driver_cuda_major(plan: Plan) -> int:
    """The newest CUDA major of the plan that the driver runs; without a driver, the newest."""
    newest = (driver_cuda_version() or (max(plan.build.cuda), 0))[0]
    return max((m for m in plan.build.cuda if m <= newest), default=max(plan.build.cuda))


def older_majors(plan: Plan, arch: Arch, newest: int) -> list[int]:
    """The other CUDA majors whose builds for ``arch`` run where ``newest`` does, newest first."""
    known = sorted(plan.build.cuda, reverse=True)
    return [major for major in known if arch.cuda[0] <= major < newest]
