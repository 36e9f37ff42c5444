# SPDX-License-Identifier: Apache-2.0
"""Check arguments of top-k, and find the largest elements in plain PyTorch."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.validation import check_rank

MAX_COLUMNS = 1 << 20
LARGE = 2  # TopKTieBreak.LARGE

#: An enum reaches an export as its number.
KINDS = {"enum": Kind("int {name}", "int({name})")}


def check_scores(export: str, input: torch.Tensor, k: int, tie_break: int) -> None:
    """Raise ValueError for sizes, a number or a mode that no function of top-k takes."""
    check_rank(export, "input", input, 2, 2)
    if input.shape[1] > MAX_COLUMNS:
        raise ValueError(
            f"{export}: input must have at most {MAX_COLUMNS} columns, got shape {[*input.shape]}"
        )
    if k < 1:
        raise ValueError(f"{export}: k must be at least 1, got {k}")
    if k > MAX_COLUMNS:
        raise ValueError(f"{export}: k must be at most {MAX_COLUMNS}, got {k}")
    if tie_break not in (0, 1, 2):
        raise ValueError(f"{export}: tie_break must be 0, 1 or 2, got {tie_break}")


def new(dtype: str) -> str:
    """Return the source of a new output, ``[rows, k]``."""
    return f"_torch.empty((input.shape[0], k), dtype={dtype}, device=input.device)"


def by_value(values: torch.Tensor, tie_break: int) -> torch.Tensor:
    """Sort the positions of each row, the largest element first; NaN is larger than all.

    Equal ones come by ascending position, or by descending where the larger ones are preferred.
    """
    if tie_break != LARGE:
        return values.sort(dim=1, descending=True, stable=True).indices
    last = values.shape[1] - 1
    return last - values.flip(1).sort(dim=1, descending=True, stable=True).indices


def largest_in_windows(
    input: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    tie_break: int,
    row_starts: torch.Tensor | None,
) -> torch.Tensor:
    """Find positions in the window of each row, ``[rows, k]``, ascending, then -1.

    A window begins and ends within its row, whatever its start and length are.
    """
    size = input.shape[1]
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts.clamp(0, size)
    starts = starts.long()[:, None]
    lengths = torch.minimum(lengths.long()[:, None], size - starts).clamp(min=0)
    order = by_value(input, tie_break) - starts
    outside = (order < 0) | (order >= lengths)
    order = order.gather(1, outside.to(torch.int8).sort(dim=1, stable=True).indices)
    found = torch.nn.functional.pad(order, (0, max(0, k - size)))[:, :k]
    rank = torch.arange(k, device=input.device)
    ascending = found.where(rank < lengths, size).sort(dim=1).values
    return ascending.where(rank < lengths, -1)
