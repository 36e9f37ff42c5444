# SPDX-License-Identifier: Apache-2.0
"""The same merges of attention states through FlashInfer: the same numbers."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

import precast
from precast.testing import assert_close
from precast.testing.tolerances import Tolerance, tolerance_of_attention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


def compare(
    name: str,
    mine: tuple[torch.Tensor, ...],
    theirs: tuple[torch.Tensor, ...],
    *,
    tolerance: Tolerance | None = None,
) -> None:
    rtol, atol = (2 * tolerance.rtol, 2 * tolerance.atol) if tolerance else (None, None)
    assert_close(mine[0], theirs[0], name=f"{name}: v", rtol=rtol, atol=atol)
    assert_close(mine[1], theirs[1], name=f"{name}: s", rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_merges(dim: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    import flashinfer

    for tokens, heads, count in ((1, 8, 2), (67, 32, 3), (9, 8, 40)):
        shape = tokens, count, heads, dim
        v = torch.randn(shape, device=generator.device, generator=generator).to(dtype)
        s = 4 * torch.randn(shape[:-1], device=generator.device, generator=generator)
        s[0, 0, 0] = -math.inf  # of one state alone: of several FlashInfer's differ
        pair = [t[:, i].contiguous() for i in (0, 1) for t in (v, s)]
        compare("pair", precast.merge_state(*pair), flashinfer.merge_state(*pair))
        # Where states are more than tokens, theirs rounds partial sums to the dtype of v.
        many = tolerance_of_attention(dtype) if count > tokens else None
        merged = precast.merge_states(v, s), flashinfer.merge_states(v, s)
        compare("states", *merged, tolerance=many)
        mask = torch.rand(tokens, device=v.device, generator=generator) < 0.5
        for mask_of_call in (None, mask):
            made = []
            for library in (precast, flashinfer):
                state = pair[0].clone(), pair[1].clone()
                library.merge_state_in_place(*state, *pair[2:], mask_of_call)
                made.append(state)
            compare("in place", *made)
