# SPDX-License-Identifier: Apache-2.0
"""Which BLOCK_M a call takes: one that exists for the GPU, by the table of aot_configs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from precast._ops.attention import heuristics
from precast._plan.installed import plan

ATTENTION = plan().config.op("attention")
GPU = torch.device("cuda", 0)
DIMS = (256, 256)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that the GPU has a compute capability; return the target that it runs."""

    shared_kib = heuristics.shared_kib.__wrapped__  # a GPU is asked once

    def pretend(capability: str, sms: int = 100):
        major, minor = map(int, capability.split("."))
        properties = SimpleNamespace(major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(heuristics, "shared_kib", shared_kib)
        monkeypatch.setattr(heuristics, "get_device_sm_count", lambda device: sms)
        return plan().target("attention", capability)

    return pretend


@pytest.mark.parametrize("capability", plan().build.capabilities)
def test_the_largest_tile_is_one_that_the_target_has(gpu, capability):
    target = gpu(capability)
    for point in ATTENTION.space.points():
        there = [
            tile.block_m
            for tile in ATTENTION.tiles.shapes
            if all(point[name] == value for name, value in tile.values.items())
            if tile.min_shared_kib <= target.shared_kib
        ]
        assert heuristics.largest((point["head_dim_qk"], point["head_dim_vo"]), GPU) == max(there)


def test_a_device_takes_the_shared_memory_of_the_target_it_runs(gpu):
    """8.7 has 163 KiB, but runs what is built for the 99 KiB of 8.6."""
    large = [heuristics.largest(DIMS, GPU) for c in ("8.0", "9.0", "10.3") if gpu(c)]
    small = [heuristics.largest(DIMS, GPU) for c in ("8.6", "8.7", "8.9", "12.0") if gpu(c)]
    assert set(large) == {128}
    assert set(small) == {64}
    assert heuristics.largest(DIMS, torch.device("cpu")) == 64


@pytest.mark.parametrize(
    ("q_len", "tokens", "head_dim", "block_m"),
    [
        (1, 100, 128, 16),
        (4, None, 128, 16),  # 16 packed rows
        (5, None, 128, 64),
        (16, 10**6, 128, 64),
        (17, None, 128, 64),  # the number of tokens is not known
        (17, 10**6, 128, 128),
        (None, 10**6, 128, 128),
        (1000, 1000, 128, 64),  # too few tiles for 100 SMs
        (33, 100, 256, 64),  # 132 rows would fill two tiles of 128 badly
        (32, 100, 256, 128),  # 128 rows fill the tile
        (None, 100, 256, 128),
        (1000, 10**6, 512, 64),
    ],
)
def test_the_choice_by_lengths(gpu, q_len, tokens, head_dim, block_m):
    gpu("9.0")
    assert heuristics.choose(q_len, tokens, 32, 8, (head_dim, head_dim), GPU) == block_m


@pytest.mark.parametrize(
    ("tokens", "batch_size", "group", "q_len"),
    [(8, 8, 4, 1), (3, 8, 4, 1), (9, 8, 4, 5), (64, 8, 4, 8), (65, 8, 1, 17), (0, 0, 4, 1)],
)
def test_a_sum_of_queries_is_a_decode_or_their_mean(tokens, batch_size, group, q_len):
    assert heuristics.likely_q_len(tokens, batch_size, group) == q_len


def test_a_tile_that_is_for_many_needs_as_many_as_the_table_says(gpu):
    gpu("9.0", sms=10)
    (tile,) = {
        (tile.block_m, tile.min_tiles_per_sm)
        for tile in ATTENTION.tiles.shapes
        if tile.min_tiles_per_sm
    }
    block_m, per_sm = tile
    enough = block_m * per_sm * 10 // 32
    assert heuristics.choose(None, enough, 32, 8, (192, 128), GPU) == block_m
    assert heuristics.choose(None, enough - 1, 32, 8, (192, 128), GPU) < block_m
