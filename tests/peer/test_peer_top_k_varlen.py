# SPDX-License-Identifier: Apache-2.0
"""Top-k of the rows of requests beside FlashInfer's: the same positions and values."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled

import precast

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


def theirs() -> Any:
    import flashinfer

    return flashinfer.top_k_varlen


def test_arguments_stand_where_theirs_do() -> None:
    mine = inspect.signature(precast.top_k_varlen).parameters.values()
    for own, other in zip(mine, inspect.signature(theirs()).parameters.values()):
        assert (own.name, own.kind, own.default) == (other.name, other.kind, other.default)


@pytest.mark.flashinfer_topk
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("next_n", "ratio"), [(1, 1), (2, 1), (1, 4), (3, 4)])
def test_the_same_positions(
    next_n: int, ratio: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    requests, size, k = 11, 12000, 512
    order = torch.rand(requests * next_n, size, device="cuda", generator=generator).argsort(dim=1)
    if dtype == torch.float32:
        logits = (order - size / 2).float()
    else:  # Different numbers, which the two cannot choose from otherwise.
        logits = (order + 0x2000).to(torch.int16).view(dtype)
    lens = torch.randint(0, ratio * size, (requests,), device="cuda", generator=generator).int()
    lens[:3] = torch.tensor([0, 9, ratio * size])
    given = (logits, lens, k, None, ratio, next_n, True)
    mine = precast.top_k_varlen(*given, backend="radix_cutlass")
    with compiled():
        other = theirs()(*given, backend="radix_cutlass")
    for got, want in zip(mine, other, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(mine[0].sort(dim=1).values, other[0].sort(dim=1).values)
    assert torch.equal(mine[1].float().sort(dim=1).values, other[1].float().sort(dim=1).values)
