# SPDX-License-Identifier: Apache-2.0
"""What JIT has for a module that no provider serves: a cached build, or a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from precast._base.errors import ToolchainError
from precast._jit import cache, cute_dsl, policy
from precast._jit.cuda_major import driver_cuda_major, jit_cuda_major, older_majors
from precast._jit.env import cache_dir
from precast._jit.toolchain import find_toolchain
from precast._plan.planner import Plan
from precast._plan.spec import ModuleSpec
from precast._runtime.resolution import Resolution, Step


def resolve_jit(
    plan: Plan,
    op: str,
    axes: Mapping[str, object],
    capability: str,
    provider_steps: Sequence[Step],
) -> Resolution:
    """Go on after the providers: look into the cache, then say whether a compile is possible.

    Nothing is compiled. The resolution has a path if the cache holds a build; otherwise its last
    step says whether the module would be compiled, and if not, why.
    """
    target = plan.target(op, capability)
    # Where compiling is forbidden, no compiler is started, not even to ask for its version.
    may_compile = policy.refusal() is None
    major = jit_cuda_major(plan, target) if may_compile else driver_cuda_major(plan)
    spec = plan.spec(op, axes, capability, major)
    compile_step = _compile_step(spec)
    candidates = [spec]
    if not compile_step.accepted:
        # What this machine cannot compile may have been built elsewhere, for any CUDA that runs.
        majors = older_majors(plan, target, spec.cuda_major)
        candidates += [plan.spec(op, axes, target, major) for major in majors]
    found, path, cache_steps = _look_into_cache(candidates)
    steps = (*provider_steps, *cache_steps)
    if found is not None:
        return Resolution(spec.name, capability, path, found.cuda_major, steps)
    return Resolution(spec.name, capability, None, spec.cuda_major, (*steps, compile_step))


def _compile_step(spec: ModuleSpec) -> Step:
    """Whether ``spec`` would be compiled: the policy must allow it, then a compiler must fit."""
    refusal = policy.refusal()
    if refusal is not None:
        return Step("JIT", "", False, f"compiling is forbidden ({refusal})")
    return _toolchain_step(spec)


def _toolchain_step(spec: ModuleSpec) -> Step:
    try:
        toolchain = find_toolchain(spec.arch, spec.cuda_major, spec.tvm_ffi_range)
    except ToolchainError as error:
        return Step("JIT", "", False, str(error).replace("\n", " "))
    problem = cute_dsl.problem(spec)
    if problem is not None:
        return Step("JIT", str(toolchain.toolkit), False, problem)
    return Step("JIT", str(toolchain.toolkit), True, "would be compiled")


def _look_into_cache(
    candidates: Iterable[ModuleSpec],
) -> tuple[ModuleSpec | None, Path | None, list[Step]]:
    """The first of ``candidates`` that the cache holds, its library, and a step for each look."""
    steps: list[Step] = []
    name = ""
    for spec in candidates:
        name = spec.name
        found = cache.find(spec)
        steps += [Step("JIT cache", str(folder), False, why) for folder, why in found.refused]
        if found.path is not None:
            steps.append(Step("JIT cache", str(found.path), True, "fingerprint matches"))
            return spec, found.path, steps
    if not steps:
        steps.append(Step("JIT cache", str(cache_dir()), False, f"holds no build of {name}"))
    return None, None, steps
