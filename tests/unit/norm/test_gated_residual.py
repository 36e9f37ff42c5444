# SPDX-License-Identifier: Apache-2.0
"""The gated norms in reference mode, by float64; what is supported; errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast

pytestmark = pytest.mark.usefixtures("reference_mode")


def call(rows: int = 5, hidden: int = 24, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(hidden)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "branch": randn(rows, hidden).to(dtype),
        "residual": randn(rows, hidden),
        "weight": randn(hidden).to(dtype),
        "alpha": randn(hidden),
        "beta": randn(hidden),
    }


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def gated(given: dict[str, Any], eps: float, center: float) -> torch.Tensor:
    x = given["branch"].double()
    if given["weight"] is not None:
        x = x * (given["weight"].double() + center)
    alpha = given["alpha"]
    alpha = alpha.double() if isinstance(alpha, torch.Tensor) else alpha
    return alpha * given["residual"].double() + given["beta"].double() * rms(x, eps)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gated_residual(weighted: bool, dtype: torch.dtype) -> None:
    given = call(dtype=dtype)
    if not weighted:
        given["weight"] = None
    want = gated(given, 1e-3, 0.5)
    got = precast.gated_residual_rmsnorm(**given, eps=1e-3, gain_center=0.5)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert precast.norm.supports_gated_residual_rmsnorm(**given)
    residual = given["residual"]
    options = {"eps": 1e-3, "gain_center": 0.5, "out": residual}
    assert precast.gated_residual_rmsnorm(**given, **options) is residual
    assert torch.equal(residual, got)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("number", [False, True])
def test_the_next_norm(weighted: bool, number: bool) -> None:
    given = call()
    if not weighted:
        given["weight"] = None
    if number:
        given["alpha"] = 0.75
    next_weight = torch.randn(24, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = gated(given, 1e-3, 0.5)
    after = rms(want, 1e-2) * (next_weight.double() + 1.0)
    weight = given.pop("weight")
    got = precast.gated_residual_next_rmsnorm(
        **given,
        next_weight=next_weight,
        post_eps=1e-3,
        next_eps=1e-2,
        next_gain_center=1.0,
        post_weight=weight,
        post_gain_center=0.5,
    )
    assert (got[0].dtype, got[1].dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1].double(), after, rtol=1e-2, atol=1e-2)
    assert precast.norm.supports_gated_residual_next_rmsnorm(
        **given, next_weight=next_weight, post_weight=weight
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"branch": torch.zeros(5, 24)}, "branch must be float16 or bfloat16, got float32"),
        ({"branch": torch.zeros(24).half()}, "branch must have 2 dimensions, got shape"),
        ({"residual": torch.zeros(5, 24).half()}, "residual must be float32, got float16"),
        ({"residual": torch.zeros(5, 23)}, r"residual must have shape \[5, 24\], got \[5, 23\]"),
        ({"weight": torch.zeros(24)}, "weight must be bfloat16, got float32"),
        ({"alpha": torch.zeros(24).half()}, "alpha must be float32, got float16"),
        ({"beta": torch.zeros(23)}, r"beta must have shape \[24\], got \[23\]"),
        ({"eps": -1.0}, "eps must be a finite number of at least 0, got -1.0"),
        ({"gain_center": float("nan")}, "gain_center must be a number, not NaN, got nan"),
        ({"out": torch.zeros(4, 24)}, "out must have residual's shape"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    given = {**call(), **change}
    with pytest.raises(ValueError, match=f"^gated_residual_rmsnorm: {words}"):
        precast.gated_residual_rmsnorm(**given)
    tensors = {name: given[name] for name in ("branch", "residual", "weight", "alpha", "beta")}
    if not {*change} & {"eps", "gain_center", "out"}:
        assert not precast.norm.supports_gated_residual_rmsnorm(**tensors)
        tensors["next_weight"] = tensors.pop("weight")
        assert not precast.norm.supports_gated_residual_next_rmsnorm(**tensors)


def test_what_the_next_norm_refuses() -> None:
    given: dict[str, Any] = call()
    given["next_weight"] = given.pop("weight")
    for change, words in (
        ({"alpha": float("nan")}, "alpha must be a number, not NaN, got nan"),
        ({"next_weight": torch.zeros(24)}, "next_weight must be bfloat16, got float32"),
        ({"post_weight": torch.zeros(24)}, "post_weight must be bfloat16, got float32"),
        ({"ffn_input": torch.zeros(5, 24)}, "ffn_input must be bfloat16, got float32"),
        ({"next_eps": -1.0}, "next_eps must be a finite number of at least 0, got -1.0"),
    ):
        with pytest.raises(ValueError, match=f"^gated_residual_next_rmsnorm: {words}"):
            precast.gated_residual_next_rmsnorm(**{**given, **change})
    with pytest.raises(TypeError, match=r"alpha must be a torch\.Tensor or a number, got str"):
        precast.gated_residual_next_rmsnorm(**{**given, "alpha": "1"})
    assert not precast.norm.supports_gated_residual_next_rmsnorm(**{**given, "alpha": "1"})
