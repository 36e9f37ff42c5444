# SPDX-License-Identifier: Apache-2.0
"""The fused mixture of experts with MXFP4 weights beside FlashInfer's, each with its own order."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled
from moe_support import mxfp4, random_selection

import precast

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
BF16 = torch.bfloat16


@pytest.mark.parametrize("numbers", [None, (1.702, 1.0, 7.0)], ids=["swiglu", "gpt-oss"])
@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "hidden", "inter"),
    [(1, 2, 4, 128, 256), (4, 2, 8, 768, 512), (70, 4, 32, 512, 384)],
)
def test_cutlass_fused_moe(
    tokens: int,
    slots: int,
    experts: int,
    hidden: int,
    inter: int,
    numbers: tuple[float, ...] | None,
    generator: torch.Generator,
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashInfer has these kernels for compute capability 9.0 alone")
    from flashinfer import fused_moe as theirs

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda") * scale

    x = normal(tokens, hidden).to(BF16)
    weights = [normal(experts, 2 * inter, hidden), normal(experts, hidden, inter)]
    packed = [mxfp4(weight * weight.shape[2] ** -0.5)[:2] for weight in weights]
    selected = random_selection(tokens, slots, experts, generator)
    scales = torch.rand(tokens, slots, generator=generator, device="cuda")
    options: dict[str, Any] = {
        "fc1_expert_biases": normal(experts, 2 * inter, scale=0.2).to(BF16),
        "fc2_expert_biases": normal(experts, hidden, scale=0.2).to(BF16),
    }
    for name, number in zip(("alpha", "beta", "limit"), numbers or (), strict=False):
        options[f"swiglu_{name}"] = torch.full((experts,), number, device="cuda")

    def run(library: Any) -> torch.Tensor:
        out = torch.zeros_like(x)
        fc1, fc2 = (library.interleave_moe_weights_for_sm90_mixed_gemm(w, "fp4") for w, _ in packed)
        folded = [library.interleave_moe_scales_for_sm90_mixed_gemm(s) for _, s in packed]
        library.cutlass_fused_moe(
            *(x, selected, scales, fc1, fc2, BF16),
            quant_scales=[scale.view(torch.int32) for scale in folded],
            use_w4_group_scaling=True,
            output=out,
            **options,
        )
        return out

    mine = run(precast.fused_moe)
    with compiled():
        want = run(theirs)
    error, length = (mine.double() - want.double()).norm(dim=1), want.double().norm(dim=1)
    assert (error <= 0.02 * length).all()
    for _, scale in packed:  # scales have one order in both libraries
        assert torch.equal(
            precast.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scale),
            theirs.interleave_moe_scales_for_sm90_mixed_gemm(scale),
        )
