# SPDX-License-Identifier: Apache-2.0
"""Calls of mono_moe for tests, with their results in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from moe_support import Experts, draw

import precast
from precast._ops.moe import _few_tokens


@pytest.fixture
def two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """cutlass_fused_moe takes two launches wherever it can."""
    for key in _few_tokens.FASTER_UP_TO_BYTES:
        monkeypatch.setitem(_few_tokens.FASTER_UP_TO_BYTES, key, 1 << 62)


def call_few_tokens() -> None:
    """Call cutlass_fused_moe so that it takes two launches, which its trace does not."""
    draw(3, 2, 4, 256, 128, torch.Generator().manual_seed(5), mode="blocks").run()


@dataclasses.dataclass
class MonoCall:
    """One call: experts as :mod:`moe_support` draws them, and the logits of a router."""

    experts: Experts
    logits: torch.Tensor
    top_k: int
    scoring_func: str = "softmax"
    renormalize: bool = True

    @property
    def operands(self) -> tuple[Any, ...]:
        """The tensors of a call; the gate is above, unlike in ``experts``."""
        first, second = self.experts.fc1.view(torch.uint8).chunk(2, dim=1)
        weight = torch.cat([second, first], dim=1).view(self.experts.fc1.dtype)
        assert self.experts.scales is not None
        up, gate = self.experts.scales[0].chunk(2, dim=1)
        scale = torch.cat([gate, up], dim=1)
        return (
            *(self.experts.x, self.logits, weight, scale),
            *(self.experts.fc2, self.experts.scales[1], self.top_k),
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"scoring_func": self.scoring_func, "renormalize": self.renormalize}

    def run(self, **more: Any) -> torch.Tensor:
        out: torch.Tensor = precast.fused_moe.mono_moe(*self.operands, **self.options, **more)
        return out

    def check(self, got: torch.Tensor) -> None:
        """Compare with float64, with experts that are chosen here."""
        logits = self.logits.double()
        lowest = torch.finfo(self.logits.dtype).min
        logits = torch.where(logits.isfinite(), logits, lowest)
        order = logits.sort(dim=1, descending=True, stable=True).indices[:, : self.top_k]
        scores = logits.softmax(dim=1) if self.scoring_func == "softmax" else logits.sigmoid()
        weights = scores.gather(1, order)
        if self.renormalize:
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-300)
        self.experts.selected, self.experts.weights = order.int(), weights.float()
        self.experts.check(got)


def draw_mono(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inter: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> MonoCall:
    call = draw(tokens, top_k, experts, hidden, inter, generator, dtype, "blocks")
    logits = torch.randn(tokens, experts, generator=generator, device=generator.device) * 2
    return MonoCall(call, logits.to(dtype), top_k, **options)
