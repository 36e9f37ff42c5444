# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a mixture of experts beside FlashInfer's."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from flashinfer_modules import compiled
from lora_support import Lora, draw

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


def known(tokens: int, rank: int, dtype: torch.dtype, generator: torch.Generator) -> Lora:
    """A call of sizes that FlashInfer has kernels for; every expert exists, as it demands."""
    call = draw(*(tokens, 4, 2048, (768, 768), rank, dtype, generator))
    call.experts = call.experts.clamp(0, call.count - 1)
    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_steps_and_whole(rank: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    flashinfer = pytest.importorskip("flashinfer.fused_moe")
    if not hasattr(flashinfer, "bgmv_moe"):
        pytest.skip("this FlashInfer has no bgmv_moe")
    eps = torch.finfo(dtype).eps
    for tokens in (1, 33, 600):
        call = known(tokens, rank, dtype, generator)
        pairs = len(call.tokens)
        table, stride = call.tables(call.a)
        theirs = torch.zeros(2, pairs, rank, dtype=dtype, device="cuda")
        with compiled():
            flashinfer.bgmv_moe_shrink(theirs, call.x, table, *call.pairs, stride)
        mine = torch.zeros_like(theirs)
        call.shrink(mine)
        assert torch.allclose(mine.double(), theirs.double(), rtol=2 * eps, atol=1e-4)
        table, stride = call.tables(call.b)
        routed = call.tokens, call.experts, call.weights, call.loras, call.starts()
        for finalize, rows in ((True, tokens), (False, pairs)):
            sums = torch.zeros(rows, 1536, device="cuda")
            flashinfer.bgmv_moe_expand(
                sums, mine, table, *routed, [768, 768], stride, finalize=finalize
            )
            own = torch.zeros_like(sums)
            call.expand(own, mine, finalize=finalize)
            assert torch.allclose(own, sums, rtol=1e-5, atol=1e-3)
        given = call.x, call.a, call.b, *call.pairs, call.weights, call.count
        whole = flashinfer.bgmv_moe(*given)
        # The rank's numbers may round to their neighbours.
        assert torch.allclose(call.run().double(), whole.double(), rtol=2 * eps, atol=32 * eps)
