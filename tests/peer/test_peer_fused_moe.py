# SPDX-License-Identifier: Apache-2.0
"""The fused mixture of experts beside FlashInfer's, whose weights of 4 bits have another order."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from flashinfer_modules import compiled
from moe_support import draw

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


@pytest.mark.parametrize("tokens", [1, 8, 64, 1000])
@pytest.mark.parametrize("mode", ["half", "blocks"])
def test_same_arguments(mode: str, tokens: int, generator: torch.Generator) -> None:
    """Qwen3-30B's layer; both are compared with float64."""
    flashinfer = pytest.importorskip("flashinfer.fused_moe")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashInfer's kernels by block scales are for compute capability 9.0")
    call = draw(tokens, 8, 128, 2048, 768, generator, mode=mode, skew=0.5)
    given = call.x, call.selected, call.weights, call.fc1, call.fc2, call.dtype, call.scales
    blocks = {"use_deepseek_fp8_block_scale": call.is_blocks}
    with compiled():
        # Their fused sum over experts rounds after each of them.
        theirs = flashinfer.cutlass_fused_moe(*given, **blocks, use_fused_finalize=False)
    call.check(theirs[0] if isinstance(theirs, list) else theirs)
    call.check(call.run())
