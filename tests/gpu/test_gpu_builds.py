# SPDX-License-Identifier: Apache-2.0
"""A module that JIT compiles computes bit for bit what the prebuilt one does."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import CASES, DTYPES, OpCase, grid, grid_id
from op_case import same_bits

from precast._plan.installed import plan
from precast._runtime.library import load_library
from precast._runtime.loader import loader
from precast.jit import JitSpec
from precast.testing.rotation import clone

MODULES = sorted(
    {
        (case.module, tuple(case.axes(word).items()))
        for case in CASES.values()
        for word in case.dtypes
    }
)


def _capability() -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability())


@pytest.mark.parametrize(("case", "dtype"), grid(), ids=grid_id)
def test_prebuilt_modules_serve_the_call(
    case: OpCase, dtype: torch.dtype, generator: torch.Generator
) -> None:
    if not loader.table:
        pytest.skip("no provider of prebuilt modules is installed")
    case.check(case.arguments(case.input_shape(4, 256), dtype, generator))
    word = next(word for word, known in DTYPES.items() if known == dtype)
    resolution = loader.resolution(case.module, case.axes(word), torch.cuda.current_device())
    accepted = [step for step in resolution.steps if step.accepted]
    assert len(accepted) == 1, resolution
    assert not accepted[0].source.startswith("JIT"), resolution


@pytest.mark.jit
@pytest.mark.parametrize(("op", "items"), MODULES)
def test_jit_equals_prebuilt(
    op: str,
    items: tuple[tuple[str, str], ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
) -> None:
    device = torch.cuda.current_device()
    axes = dict(items)
    word = axes["dtype"]
    prebuilt = loader.load(op, axes, device)
    resolution = loader.resolution(op, axes, device)
    if any(step.accepted and step.source.startswith("JIT") for step in resolution.steps):
        pytest.skip(f"no prebuilt {resolution.module} is installed")
    monkeypatch.setenv("PRECAST_CACHE_DIR", str(tmp_path))
    spec = JitSpec.of(plan().spec(op, axes, _capability(), resolution.cuda_major))
    path = spec.build("a test compares it with the prebuilt module")
    assert path.is_relative_to(tmp_path)
    assert path != resolution.path
    compiled = load_library(path, spec.cuda_major)
    cases = [c for c in CASES.values() if c.module == op and word in c.dtypes]
    assert cases
    for case in cases:
        for hidden in (256, 1000, 4096):
            args = case.arguments(case.input_shape(67, hidden), DTYPES[word], generator)
            outputs = [_call(module, case, args) for module in (prebuilt, compiled)]
            for left, right in zip(*outputs, strict=True):
                assert same_bits(left, right), f"{case.name}: JIT and prebuilt differ"


def _call(module: Any, case: OpCase, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The export itself, with the arguments of the public function and every default filled in."""
    function = module.get_function(case.name)
    mine = [clone(a) if isinstance(a, torch.Tensor) else a for a in args]
    if case.call is not None:
        signature = inspect.signature(case.function)

        def by_position(*given: Any, **named: Any) -> None:
            bound = signature.bind(*given, **named, enable_pdl=True)
            bound.apply_defaults()
            function(*bound.arguments.values())

        return list(case.call(by_position, tuple(mine), None))
    arguments = [*mine, 1e-6] if case.takes_eps else mine
    if case.in_place:
        function(*arguments, True)
        return mine[:2]
    out = torch.full(
        case.out_shape(args[0].shape), float("nan"), dtype=args[0].dtype, device="cuda"
    )
    if case.name == "fused_rmsnorm_silu":
        function(*arguments, out, None, True)
    else:
        function(*arguments, out, True)
    assert not out.isnan().any()
    return [out]
