# SPDX-License-Identifier: Apache-2.0
"""The gated norms beside FlashInfer's, which run on compute capability 10.0 alone."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from flashinfer_modules import compiled

import precast
from precast.testing import assert_close

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 257])
def test_the_same_numbers(rows: int, weighted: bool, generator: torch.Generator) -> None:
    import flashinfer.norm

    hidden = 8192

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    branch, residual = randn(rows, hidden).bfloat16(), randn(rows, hidden)
    alpha, beta = randn(hidden), randn(hidden)
    weight = randn(hidden).bfloat16() if weighted else None
    after = randn(hidden).bfloat16()
    if not flashinfer.norm.supports_gated_residual_rmsnorm(branch, residual, weight, alpha, beta):
        pytest.skip("FlashInfer has no kernel for this GPU")
    with compiled():
        theirs = [
            flashinfer.norm.gated_residual_rmsnorm(branch, residual, weight, alpha, beta),
            *flashinfer.norm.gated_residual_next_rmsnorm(
                branch, residual, after, alpha, beta, post_weight=weight
            ),
        ]
    mine = [
        precast.gated_residual_rmsnorm(branch, residual, weight, alpha, beta),
        *precast.gated_residual_next_rmsnorm(
            branch, residual, after, alpha, beta, post_weight=weight
        ),
    ]
    for got, want in zip(mine, theirs, strict=True):
        assert got.dtype == want.dtype
        assert_close(got, want.double())
