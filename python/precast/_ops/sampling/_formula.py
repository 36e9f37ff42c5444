# SPDX-License-Identifier: Apache-2.0
"""How a token is chosen from weights, and a distribution cut down, in plain PyTorch."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.sampling._filters import thresholds
from precast._ops.sampling._inverse_cdf import row_sums, sample_rows
from precast._ops.sampling._philox import uniforms

# Draws of a token before the threshold of top-p is looked for.
ROUNDS = 4


def chosen(
    weights: torch.Tensor,
    indices: torch.Tensor | None = None,
    top_k: torch.Tensor | int = 0,
    top_p: torch.Tensor | float = 1.0,
    min_p: torch.Tensor | float = 0.0,
    joint: bool = False,
    seed: torch.Tensor | int | None = 0,
    offset: torch.Tensor | int | None = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, int64, and whether their rows were distributions, both ``[outputs]``.

    A first draw is made before it is known what top-p keeps. It stands if its token is kept, and
    then has the right distribution. Otherwise nothing up to that token's weight is kept: the next
    draw is made from what is above. The last one is made from what is kept.
    """
    device = weights.device
    outputs = weights.shape[0] if indices is None else indices.shape[0]
    rows = torch.arange(outputs, device=device) if indices is None else indices.long()
    if outputs == 0:
        return rows, rows.bool()
    by_k, by_p, by_min = thresholds(weights, top_k, top_p, min_p, joint)
    tried = weights.where(weights >= torch.maximum(by_k, by_min), 0)
    tokens = sample_rows(tried, rows, uniforms(seed, offset, outputs, 0, device))
    again = torch.arange(outputs, device=device)
    for count in range(1, ROUNDS + 1):
        drawn = weights[rows[again], tokens[again]]
        again = again[drawn < by_p[rows[again], 0]]
        if len(again) == 0:
            break
        # What is drawn from is the same for outputs of one row and one drawn weight.
        cut = torch.stack([rows[again].double(), weights[rows[again], tokens[again]].double()])
        (row, drawn), which = cut.unique(dim=1, return_inverse=True)
        left = tried[row.long()]
        kept = left > drawn[:, None] if count < ROUNDS else left >= by_p[row.long()]
        numbers = uniforms(seed, offset, outputs, count, device)[again]
        tokens[again] = sample_rows(left.where(kept, 0), which, numbers)
    total = row_sums(weights)
    valid = ((total > 0) & (total < torch.inf))[rows]
    return tokens.where(valid, 0), valid


def renormalized(weights: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Weights of at least ``least``, as shares of their sum; zeros where there is no mass.

    A row with a NaN is NaN.
    """
    kept = weights.masked_fill(weights < least, 0)
    total = row_sums(kept)[:, None]
    return torch.where(total == 0, torch.zeros_like(kept), kept / total)
