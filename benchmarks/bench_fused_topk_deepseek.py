# SPDX-License-Identifier: Apache-2.0
"""Routing of DeepSeek-V3 and Kimi K2: scores read once, eight experts a token written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.fused_moe import fused_topk_deepseek_reference
from precast.testing import poison

DTYPES = ("f32", "bf16")
#: Experts, groups, groups that are kept, experts of a token.
MODELS = ((256, 8, 4, 8), (384, 1, 1, 8))
TOKENS = (1, 64, 1024, 16384, 65536)
SCALE = 2.5


def _scores(tokens: int, groups: int, each: int) -> torch.Tensor:
    """Groups one above the other, experts by steps: there is one right choice."""
    above = torch.randn(tokens, groups, 1, device="cuda").argsort(dim=1)
    inner = torch.randn(tokens, groups, each, device="cuda").argsort(dim=2)
    return ((above * each + inner).flatten(1) - groups * each / 2) / 64


def _eager(*args: Any) -> Any:
    values, indices = fused_topk_deepseek_reference(*args[:6])
    args[6].copy_(values)
    args[7].copy_(indices)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for experts, n_group, topk_group, topk in MODELS:
        for tokens in TOKENS:

            def make(
                tokens: int = tokens,
                experts: int = experts,
                numbers: tuple[int, int, int] = (n_group, topk_group, topk),
            ) -> tuple[Any, ...]:
                scores = _scores(tokens, numbers[0], experts // numbers[0]).to(dtype)
                bias = torch.full((experts,), 0.25, dtype=dtype, device=scores.device)
                values = poison(torch.empty(tokens, numbers[2], dtype=dtype, device="cuda"))
                indices = torch.empty(tokens, numbers[2], dtype=torch.int32, device="cuda")
                return scores, bias, *numbers, SCALE, values, indices.fill_(-1)

            yield Case(
                "fused_topk_deepseek",
                f"{tokens} tokens, {topk} of {experts}, {topk_group} of {n_group} groups",
                tokens * (experts * dtype.itemsize + topk * (dtype.itemsize + 4)),
                make,
                bind=lambda route: lambda *args: route(*args),
                eager=_eager,
            )


if __name__ == "__main__":
    script(__file__)
