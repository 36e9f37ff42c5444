# SPDX-License-Identifier: Apache-2.0
"""Sums and draws in an order that the vocabulary alone decides, that of the kernels.

A row is cut into slabs of 1024 consecutive elements, each read by one warp: lane ``l`` holds the
elements ``128 * j + 4 * l + c`` of the slab, for ``j`` from 0 to 7 and ``c`` from 0 to 3. There are
8 groups of equally many slabs, of which the last ones may be short or empty. Sums are float32: of a
lane in the order of (j, c), of a slab by exchanging lanes over distances of 16, 8, 4, 2 and 1, of a
group slab by slab, of a row group by group. A draw goes down the same levels.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.sampling._philox import CHUNK

SLAB = 1024
LANES = 32
GROUPS = 8


def lane_elements(weights: torch.Tensor) -> torch.Tensor:
    """``[rows, groups, slabs, lanes, elements]`` of rows, with zeros behind their ends."""
    rows, size = weights.shape
    slabs = -(-size // (SLAB * GROUPS))  # of a group
    groups = -(-size // (SLAB * slabs))  # without those that are empty
    padded = torch.nn.functional.pad(weights, (0, groups * slabs * SLAB - size))
    lanes = padded.view(rows, groups * slabs, 8, LANES, 4).transpose(2, 3)
    return lanes.reshape(rows, groups, slabs, LANES, SLAB // LANES)


def last_sum(masses: torch.Tensor) -> torch.Tensor:
    """The sum of the last dimension, one float32 addition after the other."""
    total = masses[..., 0]
    for i in range(1, masses.shape[-1]):
        total = total + masses[..., i]
    return total


def exchanged_sum(lanes: torch.Tensor) -> torch.Tensor:
    """The sum over 32 lanes as a warp makes it by exchanges; every lane has the same."""
    lane = torch.arange(LANES, device=lanes.device)
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., lane ^ distance]
    return lanes[..., 0]


def level_masses(elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Masses of lanes, slabs and groups."""
    lanes = last_sum(elements)
    slabs = exchanged_sum(lanes)
    return lanes, slabs, last_sum(slabs)


def row_sums(weights: torch.Tensor) -> torch.Tensor:
    """The sum of each row, ``[rows]`` float32."""
    return last_sum(level_masses(lane_elements(weights))[2])


def pick(masses: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Which item of each row ``[n, items]`` the number ``[n]`` in [0, 1) falls on.

    The first whose running sum exceeds its share of the last one; where rounding leaves none, the
    last with mass. So an item without mass is never picked, if one has mass.
    """
    items = masses.t().contiguous()  # One pass over memory for each addition.
    sums = [items[0]]
    for item in items[1:]:
        sums.append(sums[-1] + item)
    last = sums[-1]
    share = uniform * last
    below, with_mass = torch.zeros((2, *last.shape), dtype=torch.int64, device=last.device)
    for running in sums:
        below += running <= share
        with_mass += running < last
    return torch.minimum(below, with_mass)


def draw(weights: torch.Tensor, rows: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """A token of the row ``rows[i]`` of ``weights`` for the four numbers ``uniform[i]``."""
    elements = lane_elements(weights)
    lanes, slabs, groups = level_masses(elements)
    tokens = []
    for at, numbers in zip(rows.split(CHUNK), uniform.split(CHUNK)):
        group = pick(groups[at], numbers[:, 0])
        slab = pick(slabs[at, group], numbers[:, 1])
        lane = pick(lanes[at, group, slab], numbers[:, 2])
        element = pick(elements[at, group, slab, lane], numbers[:, 3])
        start = (group * elements.shape[2] + slab) * SLAB
        tokens.append(start + element // 4 * 128 + lane * 4 + element % 4)
    return torch.cat(tokens)
