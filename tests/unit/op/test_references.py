# SPDX-License-Identifier: Apache-2.0
"""The references against torch's own functions in float64, and the public API in reference mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import precast
from precast import activation, norm
from precast._ops.elementwise.scale import scale_reference
from precast.errors import DtypeRuntimeError

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1, 8), (7, 129), (2, 3, 64)]
EPS = 1e-5

# One rounding of the output dtype, plus what fp32 arithmetic may add.
TOLERANCE = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-21}


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor, absolute: float = 1e-6) -> None:
    """``actual`` is the float64 ``exact`` after one rounding to its dtype."""
    assert actual.shape == exact.shape
    relative = 1.01 * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=relative, atol=absolute)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


pytestmark = pytest.mark.usefixtures("reference_mode")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    result = scale_reference(x, 1.7)
    assert result.dtype == dtype
    assert_rounded(result, x.double() * 1.7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [0.0, 1.0], ids=["rmsnorm", "gemma"])
def test_rmsnorm(shape: tuple[int, ...], dtype: torch.dtype, bias: float) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1)
    reference = norm.gemma_rmsnorm_reference if bias else norm.rmsnorm_reference
    exact = torch.nn.functional.rms_norm(x.double(), shape[-1:], weight.double() + bias, EPS)
    result = reference(x, weight, EPS)
    assert result.dtype == dtype
    assert_rounded(result, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [0.0, 1.0], ids=["rmsnorm", "gemma"])
def test_fused_add_rmsnorm(shape: tuple[int, ...], dtype: torch.dtype, bias: float) -> None:
    x, residual = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weight = draw(shape[-1], dtype=dtype, seed=2)
    reference = norm.gemma_fused_add_rmsnorm_reference if bias else norm.fused_add_rmsnorm_reference
    total = x.double() + residual.double()
    exact = torch.nn.functional.rms_norm(total, shape[-1:], weight.double() + bias, EPS)
    normalized, added = reference(x, residual, weight, EPS)
    assert normalized.dtype == added.dtype == dtype
    assert_rounded(added, total)
    assert_rounded(normalized, exact)


def test_fused_add_rmsnorm_normalizes_the_unrounded_sum() -> None:
    x = draw(4, 64, dtype=torch.bfloat16)
    residual = draw(4, 64, dtype=torch.bfloat16, seed=1)
    weight = draw(64, dtype=torch.bfloat16, seed=2)
    normalized, added = norm.fused_add_rmsnorm_reference(x, residual, weight, EPS)
    total = x.double() + residual.double()
    exact = torch.nn.functional.rms_norm(total, (64,), weight.double(), EPS).bfloat16()
    of_rounded_sum = norm.rmsnorm_reference(added, weight, EPS)
    assert torch.equal(normalized, exact)
    assert not torch.equal(normalized, of_rounded_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_layernorm(shape: tuple[int, ...], dtype: torch.dtype, mean: float) -> None:
    x = draw(*shape, dtype=dtype) + mean
    gamma, beta = (draw(shape[-1], dtype=torch.float32, seed=s) for s in (1, 2))
    exact = torch.nn.functional.layer_norm(
        x.double(), shape[-1:], gamma.double(), beta.double(), EPS
    )
    result = norm.layernorm_reference(x, gamma, beta, EPS)
    assert result.dtype == dtype
    assert_rounded(result, exact, absolute=1e-4)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_and_mul": torch.nn.functional.silu,
    "gelu_and_mul": torch.nn.functional.gelu,
    "gelu_tanh_and_mul": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (7, 128), (2, 3, 64), (8,)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    half = shape[-1] // 2
    exact = ACTIVATIONS[name](x[..., :half].double()) * x[..., half:].double()
    result = getattr(activation, f"{name}_reference")(x)
    assert result.dtype == dtype
    # fp32 erf and tanh cancel near zero: an absolute error of their last place times |gate * up|.
    assert_rounded(result, exact, absolute=1e-5)


def test_outputs_are_written_in_place_or_returned() -> None:
    x, weight = draw(4, 16, dtype=torch.float16), draw(16, dtype=torch.float16, seed=1)
    out = torch.full_like(x, torch.nan)
    assert precast.rmsnorm(x, weight, EPS, out=out) is out
    assert torch.equal(out, norm.rmsnorm_reference(x, weight, EPS))
    assert torch.equal(precast.gemma_rmsnorm(x, weight), norm.gemma_rmsnorm_reference(x, weight))

    out = torch.full_like(x, torch.nan)
    assert precast.scale(x, 0.3, out=out) is out
    assert torch.equal(out, scale_reference(x, 0.3))

    out = x.new_full((4, 8), torch.nan)
    assert precast.silu_and_mul(x, out=out) is out
    assert torch.equal(out, activation.silu_and_mul_reference(x))
    assert precast.gelu_and_mul(x).shape == precast.gelu_tanh_and_mul(x).shape == (4, 8)

    expected = norm.fused_add_rmsnorm_reference(x, 2 * x, weight)
    residual = 2 * x
    precast.fused_add_rmsnorm(x, residual, weight)
    assert torch.equal(x, expected[0]) and torch.equal(residual, expected[1])


def test_outputs_do_not_require_grad() -> None:
    x = torch.nn.Parameter(draw(4, 16, dtype=torch.float16))
    weight = torch.nn.Parameter(draw(16, dtype=torch.float16, seed=1))
    with torch.no_grad():
        assert not precast.rmsnorm(x, weight).requires_grad
        assert not precast.silu_and_mul(x).requires_grad
        assert not precast.scale(x, 2.0).requires_grad


def test_layernorm_rejects_other_dtypes() -> None:
    x, one = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(DtypeRuntimeError, match="input must be bfloat16"):
        precast.layernorm(x, one, one)
