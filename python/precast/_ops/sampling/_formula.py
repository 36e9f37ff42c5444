# SPDX-License-Identifier: Apache-2.0
"""Compute weights of tokens and thresholds of filters, and draw tokens, in plain PyTorch.

A filter keeps the tokens whose weight is at least its threshold, including all that are equal to
it.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._ops.sampling._inverse_cdf import row_sums, sample_rows
from precast._ops.sampling._philox import uniforms

FIXED_POINT = 2.0**31
MAX_FLOAT = 3.4028234663852886e38

# The last of so many draws of a token is made with the threshold of top-p.
ROUNDS = 4


def parameter(
    value: torch.Tensor | float, rows: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a number, or one for each row, as ``[rows, 1]``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype).reshape(-1, 1)
    return torch.full((rows, 1), value, dtype=dtype, device=device)


def weights_of_probs(probs: torch.Tensor) -> torch.Tensor:
    """Return probabilities in float32; negative ones become 0."""
    return probs.float().clamp(min=0)


def weights_of_logits(logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """Compute ``exp((x - max) / temperature)``; at a temperature of 0 only maxima have mass."""
    x = logits.float()
    scale = 1 / parameter(temperature, x.shape[0], torch.float32, x.device)
    return ((x - x.max(dim=1, keepdim=True).values) * scale.clamp(max=MAX_FLOAT)).exp()


# -- filters --------------------------------------------------------------------------------------


def top_k_threshold(weights: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Find the k-th largest of each row, ``[rows, 1]``; minus infinity where k keeps all."""
    rows, size = weights.shape
    k = parameter(top_k, rows, torch.int64, weights.device)
    order = weights.sort(dim=1, descending=True).values
    kth = order.gather(1, (k - 1).clamp(0, max(size - 1, 0)))
    return torch.where((k > 0) & (k < size), kth, -torch.inf)


def top_p_threshold(
    weights: torch.Tensor, top_p: torch.Tensor | float, kept: torch.Tensor
) -> torch.Tensor:
    """Find the least weight of the smallest set with ``top_p`` of the mass of ``kept``.

    A token belongs to it if less than that share is strictly above it. Masses are counted in units
    of 2^-31 of the whole, so that their sums depend on no order. The result is ``[rows, 1]``, minus
    infinity where ``top_p`` is 1 or more.
    """
    p = parameter(top_p, weights.shape[0], torch.float32, weights.device)
    inside = weights.where(kept, 0)
    total = row_sums(inside)[:, None]
    scale = (torch.full_like(total, FIXED_POINT) / total).clamp(max=MAX_FLOAT)
    needed = (p.double() * FIXED_POINT).ceil().clamp(min=1)
    order = inside.sort(dim=1, descending=True).values
    masses = (order * scale).nan_to_num(0, 0).round().double()  # whole numbers below 2^53
    above = masses.cumsum(dim=1) - masses
    first_of_ties = torch.ones_like(order, dtype=torch.bool)
    first_of_ties[:, 1:] = order[:, 1:] != order[:, :-1]
    in_set = order.where(first_of_ties & (above < needed), torch.inf)
    return torch.where(p < 1, in_set.min(dim=1, keepdim=True).values, -torch.inf)


def min_p_threshold(weights: torch.Tensor, min_p: torch.Tensor | float) -> torch.Tensor:
    """Compute a share of each row's maximum, ``[rows, 1]``; minus infinity where it is off."""
    share = parameter(min_p, weights.shape[0], torch.float32, weights.device)
    largest = weights.max(dim=1, keepdim=True).values
    return torch.where(share > 0, share.clamp(max=1) * largest, -torch.inf)


def renormalized(weights: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Divide weights of at least ``threshold`` by their sum; rows without mass are 0.

    A row with a NaN is NaN.
    """
    kept = weights.masked_fill(weights < threshold, 0)
    total = row_sums(kept)[:, None]
    return torch.where(total == 0, torch.zeros_like(kept), kept / total)


# -- draws ----------------------------------------------------------------------------------------


def draw(
    weights: torch.Tensor,
    indices: torch.Tensor | None = None,
    top_k: torch.Tensor | int = 0,
    top_p: torch.Tensor | float = 1.0,
    min_p: torch.Tensor | float = 0.0,
    filter_apply_order: str = "top_k_first",
    seed: torch.Tensor | int | None = 0,
    offset: torch.Tensor | int | None = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens, int64, and tell whether their rows were distributions, both ``[outputs]``.

    A first draw is made before it is known what top-p keeps. It stands if its token is kept, and
    then has the right distribution. Otherwise nothing up to that token's weight is kept: the next
    draw is made from what is above. The last one is made from what is kept. If the filters are
    ``"joint"``, top-p counts the mass of all tokens, otherwise that of those that top-k keeps.
    """
    device = weights.device
    outputs = weights.shape[0] if indices is None else indices.shape[0]
    rows = torch.arange(outputs, device=device) if indices is None else indices.long()
    if outputs == 0:
        return rows, rows.bool()
    by_k, by_min = top_k_threshold(weights, top_k), min_p_threshold(weights, min_p)
    joint = filter_apply_order == "joint"
    by_p = top_p_threshold(weights, top_p, weights >= (-torch.inf if joint else by_k))
    tried = weights.where(weights >= torch.maximum(by_k, by_min), 0)
    tokens = sample_rows(tried, rows, uniforms(seed, offset, outputs, 0, device))
    again = torch.arange(outputs, device=device)
    for count in range(1, ROUNDS + 1):
        drawn = weights[rows[again], tokens[again]]
        again = again[drawn < by_p[rows[again], 0]]
        if len(again) == 0:
            break
        # What is drawn from is the same for outputs of one row and one drawn weight.
        pairs = torch.stack([rows[again].double(), weights[rows[again], tokens[again]].double()])
        (row, drawn), which = pairs.unique(dim=1, return_inverse=True)
        left = tried[row.long()]
        kept = left > drawn[:, None] if count < ROUNDS else left >= by_p[row.long()]
        numbers = uniforms(seed, offset, outputs, count, device)[again]
        tokens[again] = sample_rows(left.where(kept, 0), which, numbers)
    total = row_sums(weights)
    valid = ((total > 0) & (total < torch.inf))[rows]
    return tokens.where(valid, 0), valid


def draw_tokens(weights: torch.Tensor, indices: torch.Tensor | None, **how: Any) -> torch.Tensor:
    """Return the tokens of :func:`draw` in the dtype of ``indices``, int32 without them."""
    return draw(weights, indices, **how)[0].to(torch.int32 if indices is None else indices.dtype)
