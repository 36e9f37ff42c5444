# SPDX-License-Identifier: Apache-2.0
"""Weights of tokens, and the thresholds that filters put on them.

A filter keeps the tokens whose weight is at least its threshold, all that are equal to it among
them.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.sampling._inverse_cdf import row_sums

FIXED_POINT = 2.0**31
MOST = 3.4028234663852886e38


def parameter(
    value: torch.Tensor | float, rows: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A number, or one for each row, as ``[rows, 1]``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype).reshape(-1, 1)
    return torch.full((rows, 1), value, dtype=dtype, device=device)


def weights_of_probs(probs: torch.Tensor) -> torch.Tensor:
    """Float32; negative numbers have no mass."""
    return probs.float().clamp(min=0)


def weights_of_logits(logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """``exp((x - max) / temperature)``, float32; at a temperature of 0 only the maxima weigh."""
    x = logits.float()
    scale = 1 / parameter(temperature, x.shape[0], torch.float32, x.device)
    return ((x - x.max(dim=1, keepdim=True).values) * scale.clamp(max=MOST)).exp()


def top_k_threshold(weights: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """The k-th largest of each row, ``[rows, 1]``; minus infinity where k keeps all."""
    rows, size = weights.shape
    k = parameter(top_k, rows, torch.int64, weights.device)
    order = weights.sort(dim=1, descending=True).values
    kth = order.gather(1, (k - 1).clamp(0, max(size - 1, 0)))
    return torch.where((k > 0) & (k < size), kth, -torch.inf)


def top_p_threshold(
    weights: torch.Tensor, top_p: torch.Tensor | float, kept: torch.Tensor
) -> torch.Tensor:
    """The least weight of the smallest set with a share of ``top_p`` of the mass of ``kept``.

    A token belongs to it if less than that share is strictly above it. Masses are counted in units
    of 2^-31 of the whole, so that their sums depend on no order. ``[rows, 1]``; minus infinity
    where ``top_p`` is 1 or more.
    """
    p = parameter(top_p, weights.shape[0], torch.float32, weights.device)
    inside = weights.where(kept, 0)
    total = row_sums(inside)[:, None]
    scale = (torch.full_like(total, FIXED_POINT) / total).clamp(max=MOST)
    needed = (p.double() * FIXED_POINT).ceil().clamp(min=1)
    order = inside.sort(dim=1, descending=True).values
    masses = (order * scale).nan_to_num(0, 0).round().double()  # whole numbers below 2^53
    above = masses.cumsum(dim=1) - masses
    first_of_ties = torch.ones_like(order, dtype=torch.bool)
    first_of_ties[:, 1:] = order[:, 1:] != order[:, :-1]
    in_set = order.where(first_of_ties & (above < needed), torch.inf)
    return torch.where(p < 1, in_set.min(dim=1, keepdim=True).values, -torch.inf)


def min_p_threshold(weights: torch.Tensor, min_p: torch.Tensor | float) -> torch.Tensor:
    """A share of the largest weight of each row, ``[rows, 1]``; minus infinity where it is off."""
    share = parameter(min_p, weights.shape[0], torch.float32, weights.device)
    top = weights.max(dim=1, keepdim=True).values
    return torch.where(share > 0, share.clamp(max=1) * top, -torch.inf)


def thresholds(
    weights: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    min_p: torch.Tensor | float,
    joint: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of the three filters; with ``joint``, top-p counts the mass of all tokens."""
    by_k = top_k_threshold(weights, top_k)
    by_p = top_p_threshold(weights, top_p, weights >= (-torch.inf if joint else by_k))
    return by_k, by_p, min_p_threshold(weights, min_p)
