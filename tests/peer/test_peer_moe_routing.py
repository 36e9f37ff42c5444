# SPDX-License-Identifier: Apache-2.0
"""Routing beside FlashInfer's: the same experts in the same order, and the same weights."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [(256, 8, 4, 8), (160, 8, 3, 6)])
def test_fused_topk_deepseek(
    shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    from flashinfer.fused_moe import fused_topk_deepseek

    experts, n_group, topk_group, topk = shape
    rows = 513
    # Groups one above the other, experts by steps of 1 / 64: no two experts or groups are close.
    groups, inner = (
        torch.rand(rows, n_group, size, device="cuda", generator=generator).argsort(
            dim=1 + (size > 1)
        )
        for size in (1, experts // n_group)
    )
    scores = ((groups * (experts // n_group) + inner).flatten(1) - experts / 2) / 64
    scores, bias = scores.to(dtype), torch.full((experts,), 0.25, dtype=dtype, device="cuda")
    found = []
    for function in (precast.fused_topk_deepseek, fused_topk_deepseek):
        values = torch.full((rows, topk), -7.0, dtype=dtype, device="cuda")
        indices = torch.full((rows, topk), -7, dtype=torch.int32, device="cuda")
        replay = torch.full((rows, topk), -7, dtype=torch.int16, device="cuda")
        with compiled():
            function(
                *(scores, bias, n_group, topk_group, topk, 2.5, values, indices),
                routing_replay_out=replay,
            )
        assert torch.equal(replay.int(), indices)
        found.append((values, indices))
    (mine, experts_mine), (theirs, experts_theirs) = found
    assert torch.equal(experts_mine, experts_theirs)
    assert_close(mine, theirs.double())


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("topk", [1, 6, 8])
def test_hash_topk(topk: int, shared: int, generator: torch.Generator) -> None:
    from flashinfer.fused_moe import hash_topk

    rows, experts, vocabulary = 257, 384, 1000
    logits = 10 * torch.randn(rows, experts, device="cuda", generator=generator)
    ids = torch.randint(0, vocabulary, (rows,), device="cuda", generator=generator)
    table = torch.rand(vocabulary, experts, device="cuda", generator=generator).argsort(dim=1)
    table = table[:, :topk].int().contiguous()
    with compiled():
        theirs = hash_topk(logits, ids, table, shared, 2.5)
    mine = precast.hash_topk(logits, ids, table, shared, 2.5)
    assert torch.equal(mine[1], theirs[1])
    assert_close(mine[0], theirs[0].double())
