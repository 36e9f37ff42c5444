# SPDX-License-Identifier: Apache-2.0
"""What is done to logits before they are weighed, and what is told of them, in plain PyTorch."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.sampling._filters import parameter


def unpacked(mask: torch.Tensor, size: int) -> torch.Tensor:
    """Bits of int32 words, the lowest first, as ``[rows, size]`` bools."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask[:, :, None] >> bits & 1).flatten(1)[:, :size].bool()


def penalized(
    logits: torch.Tensor,
    repetition: torch.Tensor | float,
    frequency: torch.Tensor | float,
    presence: torch.Tensor | float,
    prompt_mask: torch.Tensor | None,
    output_counts: torch.Tensor | None,
) -> torch.Tensor:
    """Logits, float32, lowered for tokens that have been there."""
    x = logits.float()
    rows, size = x.shape
    seen = torch.zeros_like(x, dtype=torch.bool)
    if prompt_mask is not None:
        seen |= unpacked(prompt_mask, size)
    if output_counts is not None:
        seen |= output_counts > 0
    r, f, s = (
        parameter(penalty, rows, torch.float32, x.device)
        for penalty in (repetition, frequency, presence)
    )
    x = torch.where(seen, torch.where(x > 0, x / r, x * r), x)
    if output_counts is not None:
        x = x - f * output_counts.float()
        x = x - s * (output_counts > 0).float()
    return x


def with_mask(x: torch.Tensor, bitmask: torch.Tensor | None) -> torch.Tensor:
    """Minus infinity for tokens that are not allowed."""
    if bitmask is None:
        return x
    return x.masked_fill(~unpacked(bitmask, x.shape[1]), -torch.inf)


def top_of(
    x: torch.Tensor, logs: torch.Tensor, valid: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row, equal ones by their number, and their logarithms."""
    size = min(count, x.shape[1])
    order = x.sort(dim=1, descending=True, stable=True).indices[:, :size]
    top = logs.gather(1, order)
    order = order.where((top > -torch.inf) & valid[:, None], -1)
    missing = count - size
    order = torch.nn.functional.pad(order, (0, missing), value=-1)
    top = torch.nn.functional.pad(top, (0, missing), value=-torch.inf)
    top = top.masked_fill(~valid[:, None], -torch.inf)
    return order.to(torch.int32), top
