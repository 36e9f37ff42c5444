# SPDX-License-Identifier: Apache-2.0
"""The same positional and keyword arguments through FlashInfer: the same numbers."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import CASES, OpCase, grid, grid_id

from precast.testing import assert_close, packed_slice
from precast.testing.rotation import clone

# Found without importing it: the import takes seconds, and may fail for reasons of its own, which
# must not look like an absent library.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

# FlashInfer takes bfloat16 only in these.
BFLOAT16 = ("layernorm", "layernorm_quant", "fused_rmsnorm_silu")
SHARED = [
    (case, dtype)
    for case, dtype in grid()
    if (case.name not in BFLOAT16 or dtype == torch.bfloat16)
    and case.name
    != "rmsnorm_sigmoid_gate"  # Theirs has no weight, and wants compute capability 10.
]
shared = pytest.mark.parametrize(("case", "dtype"), SHARED, ids=grid_id)


def theirs(name: str) -> Callable[..., Any]:
    import flashinfer
    import flashinfer.norm

    function = getattr(flashinfer, name, None) or getattr(flashinfer.norm, name, None)
    if function is None:
        pytest.skip(f"flashinfer has no {name}")
    return function


def copy(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(clone(a) if isinstance(a, torch.Tensor) else a for a in args)


def compare(case: OpCase, args: tuple[Any, ...], **keywords: Any) -> None:
    mine, other = copy(args), copy(args)
    function = theirs(case.name)
    if case.call is not None:
        want = case.call(function, other, None, **keywords)
    else:
        result = function(*other, **keywords)
        want = other[:2] if case.in_place else (result,)
    for position, (got, expected) in enumerate(zip(case.run(mine, **keywords), want, strict=True)):
        assert got.dtype == expected.dtype
        assert_close(got, expected, name=f"{case.name}: output {position} against flashinfer")


@shared
@pytest.mark.parametrize("hidden", [128, 4096, 5120, 8192])
def test_same_numbers(
    case: OpCase, dtype: torch.dtype, hidden: int, generator: torch.Generator
) -> None:
    if case.name == "fused_add_rmsnorm_fp8_block_quant" and hidden % 256:
        pytest.skip("FlashInfer's takes multiples of 256 only")
    for rows in (1, 33, 512):
        compare(case, case.arguments(case.input_shape(rows, hidden), dtype, generator))


@shared
def test_same_numbers_by_keyword(
    case: OpCase, dtype: torch.dtype, generator: torch.Generator
) -> None:
    args = case.arguments(case.input_shape(16, 1024), dtype, generator)
    keywords: dict[str, Any] = {"eps": 1e-5} if case.takes_eps else {}
    if "enable_pdl" in inspect.signature(theirs(case.name)).parameters:
        keywords["enable_pdl"] = False
    compare(case, args, **keywords)


def test_same_per_head_norm(generator: torch.Generator) -> None:
    case = CASES["rmsnorm"]  # their gemma_rmsnorm takes two dimensions only
    x = packed_slice(33, (32, 8, 8), 0, 128, dtype=torch.bfloat16, generator=generator)
    compare(case, (x, *case.extras(x, generator)))
