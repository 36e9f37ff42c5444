# SPDX-License-Identifier: Apache-2.0
"""mono_moe beside FlashInfer's, which has one shape."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled
from moe_few_support import draw_mono
from moe_support import FP8_ERROR

from precast import fused_moe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
#: Experts, hidden, intermediate.
SHAPE = 256, 2048, 512


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_same_arguments(renormalize: bool, scoring_func: str, generator: torch.Generator) -> None:
    flashinfer = pytest.importorskip("flashinfer.fused_moe")
    if not hasattr(flashinfer, "mono_moe"):
        pytest.skip("this FlashInfer has no mono_moe")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashInfer's kernel is for compute capability 9.0")
    options: dict[str, Any] = {"scoring_func": scoring_func, "renormalize": renormalize}
    for tokens, top_k in ((1, 8), (3, 1), (8, 8), (5, 4)):
        call = draw_mono(tokens, top_k, *SHAPE, generator, **options)
        weight = call.operands[2]
        woven = fused_moe.interleave_for_tma_wgmma_up(weight)
        with compiled():
            assert torch.equal(flashinfer.interleave_for_tma_wgmma_up(weight), woven)
            theirs = flashinfer.mono_moe(*call.operands, **options)
        mine = call.run()
        far = (mine.double() - theirs.double()).norm(dim=1)
        assert (far <= FP8_ERROR * mine.double().norm(dim=1)).all()
        x, logits, _, *rest = call.operands
        theirs = flashinfer.mono_moe(x, logits, woven, *rest, **options, interleave_up=False)
        own = fused_moe.mono_moe(x, logits, woven, *rest, **options, interleave_up=False)
        assert torch.equal(own, mine)
        far = (own.double() - theirs.double()).norm(dim=1)
        assert (far <= FP8_ERROR * own.double().norm(dim=1)).all()
