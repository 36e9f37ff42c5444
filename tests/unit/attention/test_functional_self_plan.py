# SPDX-License-Identifier: Apache-2.0
"""Which calls find their own work, and the split counters that they do it with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from functional_calls import decode_arguments
from test_functional_blocks import Launched

import precast
from precast._ops.attention import heuristics
from precast._ops.attention.functional import self_plan
from precast._ops.attention.plan import read_block

BF16, I32 = torch.bfloat16, torch.int32
HEADS, DIM = 4, 64
XQA = precast.xqa_batch_decode_with_kv_cache
HEADER = Path(__file__).parents[3] / "include" / "precast" / "attention" / "self_plan.cuh"


@pytest.fixture
def launched(monkeypatch):
    return Launched(monkeypatch)


def test_a_decode_is_one_launch(launched):
    given = decode_arguments()
    for _ in range(3):
        XQA(**given)
    assert len(launched.runs) == 3
    assert len(launched.packed) == 1
    assert launched.planned == []
    (counters,) = self_plan._counters.values()
    ints, floats = launched.packed[0][5:7]
    assert ints is counters
    assert not counters.any()
    begin, end = given["workspace_buffer"].data_ptr(), given["workspace_buffer"].nbytes
    assert begin < floats.data_ptr() < begin + end == floats.data_ptr() + floats.nbytes
    assert read_block(launched.blocks[0]).shape.plans_itself


def _decode(requests: int, q_len: int = 1, **options):
    given = decode_arguments(q_len=q_len, workspace_buffer=torch.zeros(1 << 20, dtype=torch.uint8))
    return given | {
        "query": torch.zeros(requests * q_len, HEADS, DIM, dtype=BF16),
        "block_tables": torch.zeros(requests, 2, dtype=I32),
        "seq_lens": torch.zeros(requests, dtype=I32),
        **options,
    }


@pytest.mark.parametrize(
    ("given", "plans_itself"),
    [
        (_decode(1), True),
        (_decode(256), True),
        (_decode(257), False),
        (_decode(3, 8), True),  # 16 rows of a tile: two query heads a KV head.
        (_decode(3, 9), False),
        (_decode(2, q_cu_seq_lens=torch.tensor([0, 1, 2], dtype=I32)), False),
        (_decode(2, 2, mask=torch.ones(2, 2, 2, dtype=torch.uint16)), False),
        (_decode(2, window_left=5), True),
        (_decode(2, bmm1_scale=1e-20), True),
        (_decode(2, bmm1_scale=1e-40), False),
        (_decode(2, bmm1_scale=0.0), False),
        (_decode(2, bmm1_scale=-0.1), False),
        (_decode(2, bmm1_scale=torch.ones(1)), True),
        (_decode(2, workspace_buffer=torch.zeros(1 << 16 | 256, dtype=torch.uint8)), False),
    ],
    ids=str,
)
def test_which_calls_find_their_own_work(given, plans_itself, launched):
    XQA(**given)
    assert launched.planned == ([] if plans_itself else launched.blocks)
    assert bool(read_block(launched.blocks[0]).shape.plans_itself) == plans_itself


def test_scales_of_one_block_differ(launched):
    """The kernels that find their own work are for positive scales."""
    given = _decode(2)
    for scale in (0.1, -0.1, 0.2, -0.2):
        XQA(**{**given, "bmm1_scale": scale})
    assert len(launched.packed) == 2
    assert [any(block is one for one in launched.planned) for block in launched.blocks] == [
        False,
        True,
        False,
        True,
    ]


def test_workspaces_have_counters_of_their_own(launched):
    one, other = _decode(1), _decode(1)
    for given in (one, other, one, _decode(7, workspace_buffer=one["workspace_buffer"])):
        XQA(**given)
    first, second, third = (args[5] for args in launched.packed)
    assert first is third
    assert first.data_ptr() != second.data_ptr()


def test_a_graph_that_comes_first_has_a_plan(launched, monkeypatch):
    """Memory that is zeroed in a graph is not zero before the graph runs."""
    with monkeypatch.context() as capturing:
        capturing.setattr(self_plan, "is_capturing", lambda device: True)
        XQA(**_decode(1))
        assert len(launched.planned) == 1
        assert self_plan._counters == {}
    given = _decode(1)
    XQA(**given)
    with monkeypatch.context() as capturing:
        capturing.setattr(self_plan, "is_capturing", lambda device: True)
        XQA(**{**given, "window_left": 3})
    assert len(launched.planned) == 1


def test_there_are_not_more_counters_than_a_limit(launched, monkeypatch):
    monkeypatch.setattr(self_plan, "_MOST_COUNTERS", 2)
    calls = [_decode(1) for _ in range(4)]
    for given in (*calls, *calls):
        XQA(**given)
    assert len(self_plan._counters) == 2
    assert len(launched.planned) == 4


def test_limits_are_those_of_the_header():
    (most,) = re.findall(r"kMostSelfPlannedRequests = (\d+);", HEADER.read_text())
    assert int(most) == self_plan._MOST_REQUESTS
    tile = HEADER.with_name("tile.cuh").read_text()
    (rows,) = re.findall(r"kDecodeBlockM = (\d+);", tile)
    assert int(rows) == self_plan._BLOCK_M == heuristics.BLOCK_MS[0]
