# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a mixture of experts: both weights read once for each pair that has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.fused_moe import bgmv_moe_reference

DTYPES = ("bf16", "f16")
#: Tokens, hidden size, columns of gate and up, experts, slots, rank: Qwen3-30B-A3B, and layers of
#: 4096 columns with fewer experts.
SHAPES = (
    (1, 2048, 768, 128, 8, 16),
    (8, 2048, 768, 128, 8, 16),
    (64, 2048, 768, 128, 8, 16),
    (64, 2048, 768, 128, 8, 64),
    (1024, 2048, 768, 128, 8, 16),
    (1, 4096, 2688, 32, 4, 32),
    (64, 4096, 2688, 32, 4, 32),
)
ADAPTERS, SLICES = 4, 2


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, hidden, columns, experts, topk, rank in SHAPES:
        pairs = tokens * topk

        def make(
            tokens: int = tokens,
            hidden: int = hidden,
            columns: int = columns,
            experts: int = experts,
            topk: int = topk,
            rank: int = rank,
        ) -> tuple[Any, ...]:
            def normal(*shape: int) -> torch.Tensor:
                return torch.randn(shape, dtype=dtype, device="cuda")

            x = normal(tokens, hidden)
            a = [normal(ADAPTERS, experts, rank, hidden) for _ in range(SLICES)]
            b = [normal(ADAPTERS, experts, columns, rank) for _ in range(SLICES)]
            of = torch.arange(tokens, device=x.device).repeat_interleave(topk)
            chosen = torch.rand(tokens, experts, device=x.device).argsort(dim=1)[:, :topk]
            adapters = torch.arange(tokens, device=x.device) % ADAPTERS
            weights = torch.rand(tokens * topk, device=x.device)
            return x, a, b, of, chosen.flatten().contiguous(), adapters, weights, experts

        # Tokens of one adapter at one expert share its weights.
        read = min(pairs, ADAPTERS * experts) * SLICES * rank * (hidden + columns)
        written = tokens * (hidden + SLICES * columns) + 2 * SLICES * pairs * rank
        yield Case(
            "bgmv_moe",
            f"{tokens} tokens, {topk} of {experts}, {hidden} to 2 x {columns}, rank {rank}",
            (read + written) * dtype.itemsize,
            make,
            bind=lambda route: lambda *args: route(*args),
            eager=bgmv_moe_reference,
        )


if __name__ == "__main__":
    script(__file__)
