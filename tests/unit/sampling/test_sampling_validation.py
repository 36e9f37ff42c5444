# SPDX-License-Identifier: Apache-2.0
"""What numbers of a call are rejected in reference mode, and rows with NaN that are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import precast

NAN, INF = math.nan, math.inf
RANDOM = {"seed": 3, "offset": 4}

pytestmark = pytest.mark.usefixtures("reference_mode")


# -- temperatures ---------------------------------------------------------------------------------

HEATED: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "softmax": precast.softmax,
    "sample": lambda x, temperature: precast.sample(x, temperature, **RANDOM).tokens,
}
heated = pytest.mark.parametrize("name", HEATED)


@heated
@pytest.mark.parametrize("bad", [-1.0, -1, -1e-30, -INF, NAN, np.float32(-0.5)])
def test_a_temperature_below_zero_is_rejected(name: str, bad: Any) -> None:
    generator = torch.default_generator.get_state()
    with pytest.raises(ValueError, match=f"^{name}: temperature must be 0 or more, got {bad}$"):
        HEATED[name](torch.zeros(2, 5), bad)
    assert torch.equal(torch.default_generator.get_state(), generator)


@heated
@pytest.mark.parametrize("bad", [True, "hot", [1.0], 1j])
def test_a_temperature_that_is_no_number_is_rejected(name: str, bad: Any) -> None:
    words = f"^{name}: temperature must be a torch.Tensor or a number, got {type(bad).__name__}"
    with pytest.raises(TypeError, match=words):
        HEATED[name](torch.zeros(2, 5), bad)


@heated
def test_temperatures_that_are_legal(name: str) -> None:
    x = 2 * torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    call = HEATED[name]
    for zero in (0.0, -0.0, 0, torch.zeros(40)):
        found = call(x, zero)
        best = found if found.dim() == 1 else found.argmax(1)
        assert torch.equal(best.long(), x.argmax(1))
    half = call(x, 0.5)
    for same in (np.float32(0.5), np.float64(0.5), torch.full((40,), 0.5).double()):
        assert torch.equal(call(x, same), half)
    assert torch.equal(call(x, 1), call(x, 1.0))
    assert torch.equal(call(x, INF), call(torch.zeros(40, 30), 1.0))


# -- indices --------------------------------------------------------------------------------------

INDEXED: list[Callable[..., Any]] = [
    precast.sampling_from_probs,
    precast.sampling_from_logits,
    lambda x, **more: precast.top_k_sampling_from_probs(x, 2, **more),
    lambda x, **more: precast.top_p_sampling_from_probs(x, 0.5, **more),
    lambda x, **more: precast.min_p_sampling_from_probs(x, 0.5, **more),
    lambda x, **more: precast.top_k_top_p_sampling_from_probs(x, 2, 0.5, **more),
    lambda x, **more: precast.top_k_top_p_sampling_from_logits(x, 2, 0.5, **more),
]


@pytest.mark.parametrize("draw", INDEXED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [3, -1, -3, 2**31 - 1])
def test_rows_that_are_not_there_are_rejected(draw: Any, dtype: torch.dtype, bad: int) -> None:
    indices = torch.tensor([0, 2, bad, 1], dtype=dtype)
    words = (
        r"sampling_from_(probs|logits): indices must be from 0 to 2, as there are 3 rows of "
        rf"(probs|logits), got {bad}$"
    )
    with pytest.raises(IndexError, match=words):
        draw(torch.ones(3, 5), indices=indices, **RANDOM)
    with pytest.raises(ValueError, match="must have the rows that indices name"):
        draw(torch.ones(0, 5), indices=indices, **RANDOM)


# -- NaN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3, 9])
def test_renormalised_rows_with_nan_are_nan_throughout(at: int) -> None:
    x = torch.rand(3, 10, generator=torch.Generator().manual_seed(1))
    clean = x.clone()
    x[1, at] = NAN
    calls = [(precast.top_k_renorm_probs, k) for k in (1, 4, 9, 10, 0, torch.tensor([2, 3, 4]))]
    calls += [(precast.top_p_renorm_probs, p) for p in (0.0, 0.5, 1.0, torch.full((3,), 0.7))]
    for call, value in calls:
        out, whole = call(x, value), call(clean, value)
        assert out[1].isnan().all()
        assert torch.equal(out[::2], whole[::2])


def test_nan_stays_in_masked_logits_and_does_not_count() -> None:
    x = torch.tensor([3.0, NAN, 1.0, -2.0, NAN, 2.0])
    for k, least in ((1, 3.0), (2, 2.0), (3, 1.0), (4, -2.0), (5, -INF), (6, -INF), (0, -INF)):
        want = x.masked_fill(x < least, -INF)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            rows = x.to(dtype)[None]
            for many in (k, torch.tensor([k])):
                got = precast.top_k_mask_logits(rows, many)[0]
                torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0, equal_nan=True)
    nothing = torch.full((1, 4), NAN)
    assert precast.top_k_mask_logits(nothing, 2).isnan().all()
