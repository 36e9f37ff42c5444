# SPDX-License-Identifier: Apache-2.0
"""Tiles that a GPU has: of heads of 256 a wide one needs more than 99 KB of shared memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from precast._ops.attention import heuristics as tiles

# 8.7 has the memory, but runs what is built for 8.6.
LARGEST = {
    (8, 0): 128,
    (8, 6): 64,
    (8, 7): 64,
    (8, 9): 64,
    (9, 0): 128,
    (10, 3): 128,
    (11, 0): 128,
    (12, 0): 64,
}


@pytest.mark.parametrize(("capability", "rows"), LARGEST.items())
def test_the_largest_tile_of_heads_of_256(capability, rows, monkeypatch):
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(tiles, "_has_room", tiles._has_room.__wrapped__)
    device = torch.device("cuda", 0)
    assert tiles.largest(256, device) == rows
    assert tiles.largest(128, device) == 128
    assert tiles.largest(512, device) == 64
