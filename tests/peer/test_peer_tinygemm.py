# SPDX-License-Identifier: Apache-2.0
"""Products of few rows beside FlashInfer's and PyTorch's."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch
from flashinfer_modules import compiled

import precast
from precast.testing import assert_close

BF16 = torch.bfloat16
ROUTERS = {"mm_M1_16_K7168_N128": (128, BF16), "mm_M1_16_K7168_N256": (256, torch.float32)}
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=generator).to(BF16)


def skip_below_hopper() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("FlashInfer needs compute capability 9.0")


@needs_flashinfer
@pytest.mark.parametrize("name", ["tinygemm_bf16", *ROUTERS])
def test_arguments_stand_where_theirs_do(name: str) -> None:
    import flashinfer.gemm

    # Theirs has keywords of its decorator behind the function's own arguments.
    mine = inspect.signature(getattr(precast, name)).parameters.values()
    theirs = inspect.signature(getattr(flashinfer.gemm, name)).parameters.values()
    for own, other in zip(mine, theirs):
        assert (own.name, own.kind, own.default) == (other.name, other.kind, other.default)


@needs_flashinfer
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(32, 2880), (128, 2880), (256, 7168), (1024, 512)])
def test_tinygemm(columns: int, depth: int, has_bias: bool, generator: torch.Generator) -> None:
    import flashinfer.gemm

    skip_below_hopper()
    weight = randn(generator, columns, depth)
    bias = randn(generator, columns) if has_bias else None
    for rows in (1, 8, 17, 64, 128):
        x = randn(generator, rows, depth)
        mine, theirs = (torch.empty(rows, columns, dtype=BF16, device="cuda") for _ in range(2))
        precast.tinygemm_bf16(x, weight, mine, bias)
        with compiled():
            flashinfer.gemm.tinygemm_bf16(x, weight, theirs, bias)
        # Both round one sum of float32; the order of addition differs.
        assert_close(mine, theirs.double(), atol=1e-3)


@needs_flashinfer
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str, generator: torch.Generator) -> None:
    import flashinfer.gemm

    skip_below_hopper()
    columns, dtype = ROUTERS[name]
    weight = randn(generator, columns, 7168)
    for rows in (1, 5, 16):
        x = randn(generator, rows, 7168)
        mine, theirs = (torch.empty(rows, columns, dtype=dtype, device="cuda") for _ in range(2))
        getattr(precast, name)(x, weight.T, mine)
        with compiled():
            getattr(flashinfer.gemm, name)(x, weight.T, theirs)
        # Tensor cores add with fewer bits than float32 has; FlashInfer's kernel has none.
        assert_close(mine, theirs.double(), rtol=2.0**-7 if dtype == BF16 else 1e-4, atol=3e-3)


def test_linear_of_torch(generator: torch.Generator) -> None:
    for rows, columns, depth in ((1, 128, 2880), (16, 256, 7168), (33, 4096, 4096)):
        x, weight = randn(generator, rows, depth), randn(generator, columns, depth)
        bias, out = randn(generator, columns), torch.empty(rows, columns, dtype=BF16, device="cuda")
        precast.tinygemm_bf16(x, weight, out, bias)
        assert_close(out, torch.nn.functional.linear(x, weight, bias).double(), atol=5e-3)
