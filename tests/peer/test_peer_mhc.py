# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections beside FlashInfer's."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled

import precast
from precast.testing import assert_close

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
NAMES = ("mhc_post", "mhc_pre_big_fuse", "mhc_pre_big_fuse_with_prenorm")


def theirs(name: str) -> Any:
    import flashinfer.mhc

    return getattr(flashinfer.mhc, name)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_stand_where_theirs_do(name: str) -> None:
    mine = [*inspect.signature(getattr(precast, name)).parameters.values()]
    for own, other in zip(mine, inspect.signature(theirs(name)).parameters.values()):
        assert (own.name, own.kind, own.default) == (other.name, other.kind, other.default)


@pytest.mark.parametrize("hidden", [64, 4096, 7168])
@pytest.mark.parametrize("splits", [1, 4, 16])
def test_the_same_numbers(hidden: int, splits: int, generator: torch.Generator) -> None:
    tokens = 77

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    split = (splits,) if splits > 1 else ()
    residual = randn(tokens, 4, hidden).to(torch.bfloat16)
    dots, squares = randn(*split, tokens, 24), randn(*split, tokens).abs() * hidden
    scale, base, layer = randn(3), randn(24), randn(tokens, hidden).to(torch.bfloat16)
    found: list[list[torch.Tensor]] = []
    for of in (lambda name: getattr(precast, name), theirs):
        with compiled():
            results = [
                *of("mhc_pre_big_fuse")(
                    *(dots, squares, residual, scale, base, 4 * hidden),
                    mhc_post_mult_value=2.0,
                    num_splits=splits,
                )
            ]
            if splits == 1:
                results += of("mhc_pre_big_fuse_with_prenorm")(dots, residual, scale, base)
            results.append(of("mhc_post")(layer, residual, results[0], results[1]))
        found.append(results)
    for mine, other in zip(*found, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        if mine.dtype == torch.float32:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
        else:
            assert_close(mine, other.double())
