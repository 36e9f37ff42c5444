# SPDX-License-Identifier: Apache-2.0
"""Which elements are the largest, in plain PyTorch."""

from __future__ import annotations

from precast._base.torch import torch

LARGE = 2  # TopKTieBreak.LARGE


def by_value(values: torch.Tensor, tie_break: int) -> torch.Tensor:
    """Positions of each row, the largest first; NaN is larger than all.

    Equal ones come by ascending position, or by descending where the larger ones are preferred.
    """
    if tie_break != LARGE:
        return values.sort(dim=1, descending=True, stable=True).indices
    last = values.shape[1] - 1
    return last - values.flip(1).sort(dim=1, descending=True, stable=True).indices


def largest_in_windows(
    values: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    tie_break: int,
    row_starts: torch.Tensor | None,
) -> torch.Tensor:
    """``[rows, k]``: positions in the window of each row, ascending, then -1.

    A window begins and ends within its row, whatever its start and length are.
    """
    size = values.shape[1]
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts.clamp(0, size)
    starts = starts.long()[:, None]
    lengths = torch.minimum(lengths.long()[:, None], size - starts).clamp(min=0)
    order = by_value(values, tie_break) - starts
    outside = (order < 0) | (order >= lengths)
    order = order.gather(1, outside.to(torch.int8).sort(dim=1, stable=True).indices)
    chosen = torch.nn.functional.pad(order, (0, max(0, k - size)))[:, :k]
    rank = torch.arange(k, device=values.device)
    ascending = chosen.where(rank < lengths, size).sort(dim=1).values
    return ascending.where(rank < lengths, -1)
