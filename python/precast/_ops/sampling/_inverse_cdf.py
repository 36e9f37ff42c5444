# SPDX-License-Identifier: Apache-2.0
"""Compute row sums and inverse-CDF samples in the kernels' order of additions.

The order depends on the vocabulary alone. A row is divided into tiles of 1024 consecutive elements,
each read by one warp: lane ``l`` holds the elements ``128 * j + 4 * l + c`` of the tile, for ``j``
from 0 to 7 and ``c`` from 0 to 3. The tiles form 8 chunks of equally many tiles, of which the last
ones may be short or empty. Sums are float32. A lane adds in the order of (j, c), a tile adds its
lanes by butterfly shuffles over distances of 16, 8, 4, 2 and 1, a chunk adds tile by tile and a row
chunk by chunk. Sampling goes down the same levels.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.sampling._philox import BATCH

TILE = 1024
LANES = 32
CHUNKS = 8


def lane_elements(weights: torch.Tensor) -> torch.Tensor:
    """View rows, padded with zeros, as ``[rows, chunks, tiles, lanes, elements]``."""
    rows, size = weights.shape
    tiles = -(-size // (TILE * CHUNKS))  # of a chunk
    chunks = -(-size // (TILE * tiles))  # without those that are empty
    padded = torch.nn.functional.pad(weights, (0, chunks * tiles * TILE - size))
    lanes = padded.view(rows, chunks * tiles, 8, LANES, 4).transpose(2, 3)
    return lanes.reshape(rows, chunks, tiles, LANES, TILE // LANES)


def sequential_sum(masses: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension by one float32 addition after the other."""
    total = masses[..., 0]
    for i in range(1, masses.shape[-1]):
        total = total + masses[..., i]
    return total


def butterfly_sum(lanes: torch.Tensor) -> torch.Tensor:
    """Sum over 32 lanes in the order of a warp's butterfly shuffles."""
    lane = torch.arange(LANES, device=lanes.device)
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., lane ^ distance]
    return lanes[..., 0]


def level_sums(elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sums of lanes, tiles and chunks."""
    lanes = sequential_sum(elements)
    tiles = butterfly_sum(lanes)
    return lanes, tiles, sequential_sum(tiles)


def row_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sum each row, ``[rows]`` float32."""
    return sequential_sum(level_sums(lane_elements(weights))[2])


def sample_level(masses: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Find the item of each row of masses ``[n, items]`` that the number ``[n]`` in [0, 1) selects.

    This is the first item whose prefix sum exceeds the number times the total, or the last item
    with mass where rounding leaves no such item. So an item without mass is selected only if no
    item has mass.
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


def sample_rows(weights: torch.Tensor, rows: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Select a token of the row ``rows[i]`` of ``weights`` by the four numbers ``uniform[i]``."""
    elements = lane_elements(weights)
    lanes, tiles, chunks = level_sums(elements)
    tokens = []
    for at, numbers in zip(rows.split(BATCH), uniform.split(BATCH)):
        chunk = sample_level(chunks[at], numbers[:, 0])
        tile = sample_level(tiles[at, chunk], numbers[:, 1])
        lane = sample_level(lanes[at, chunk, tile], numbers[:, 2])
        element = sample_level(elements[at, chunk, tile, lane], numbers[:, 3])
        start = (chunk * elements.shape[2] + tile) * TILE
        tokens.append(start + element // 4 * 128 + lane * 4 + element % 4)
    return torch.cat(tokens)
