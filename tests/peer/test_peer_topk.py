# SPDX-License-Identifier: Apache-2.0
"""Top-k beside FlashInfer's: the same signatures, elements and positions."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import pytest
import torch

import precast
from precast import topk

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


def theirs(name: str) -> Any:
    return getattr(importlib.import_module("flashinfer.topk"), name)


NAMES = ["top_k", "top_k_ragged_transform", "top_k_page_table_transform"]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_stand_where_theirs_do(name: str) -> None:
    mine = inspect.signature(getattr(topk, name)).parameters
    other = inspect.signature(theirs(name)).parameters
    assert [(p.name, p.kind) for p in mine.values()] == [(p.name, p.kind) for p in other.values()]
    for parameter, described in mine.items():
        assert described.default == other[parameter].default, parameter


def test_names_and_numbers_of_ties() -> None:
    assert {tie.name: int(tie) for tie in topk.TopKTieBreak} == {
        tie.name: int(tie) for tie in theirs("TopKTieBreak")
    }
    assert [f"{tie}" for tie in topk.TopKTieBreak] == [f"{tie}" for tie in theirs("TopKTieBreak")]
    assert callable(theirs("topk"))
    assert topk.topk is topk.top_k


@pytest.mark.flashinfer_topk
def test_whether_ties_can_be_broken() -> None:
    assert theirs("can_implement_filtered_topk")() is topk.can_implement_filtered_topk()


def scores(rows: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Rows without equal elements, which the two may choose from otherwise."""
    order = torch.rand(rows, size, device="cuda", generator=generator).argsort(dim=1)
    if dtype == torch.float32:
        return (order - size / 2).float()
    return (order + 0x2000).to(torch.int16).view(dtype)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


@pytest.mark.flashinfer_topk
@dtypes
@pytest.mark.parametrize(("rows", "size", "k"), [(1, 5000, 50), (40, 20000, 512), (7, 9000, 2048)])
def test_the_same_elements(
    rows: int, size: int, k: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = scores(rows, size, dtype, generator)
    for options in ({}, {"sorted": True}, {"deterministic": True}):
        found = []
        for function in (precast.top_k, theirs("top_k")):
            values, indices = function(x, k, **options)
            assert (values.dtype, indices.dtype) == (dtype, torch.int64)
            assert torch.equal(x.gather(1, indices), values)
            found.append((values, indices if options.get("sorted") else indices.sort(1).values))
        assert torch.equal(found[0][1], found[1][1]), options
        if options.get("sorted"):
            assert torch.equal(found[0][0], found[1][0])


def windows(rows: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Lengths and starts: an empty window, a short one, a whole row, and any."""
    starts = torch.randint(0, size // 2, (rows,), device="cuda", generator=generator)
    lengths = torch.randint(0, size // 2, (rows,), device="cuda", generator=generator)
    lengths[:2] = torch.tensor([0, 9])
    return lengths.int(), starts.int()


@pytest.mark.flashinfer_topk
@dtypes
def test_the_same_positions_in_ragged_and_paged_caches(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    rows, size, k, page = 33, 12000, 512, 16
    x = scores(rows, size, dtype, generator)
    lengths, starts = windows(rows, size, generator)
    offsets = (torch.arange(rows, device="cuda") * size).int()
    table = torch.randperm(rows * size, device="cuda", generator=generator).int().view(rows, size)
    zeros = torch.zeros_like(starts)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("top_k_ragged_transform", (x, offsets, lengths, k), {}),
        ("top_k_ragged_transform", (x, offsets, lengths, k), {"row_starts": starts}),
        ("top_k_page_table_transform", (x, table, lengths, k), {}),
        ("top_k_page_table_transform", (x, table, lengths, k), {"row_starts": starts}),
        (
            "top_k_page_table_transform",
            (x, table, lengths, k, torch.arange(rows, device="cuda").flip(0).int()),
            {"row_starts": starts, "page_table_row_starts": zeros, "page_size": page},
        ),
    ]
    for name, args, more in calls:
        got, want = getattr(precast, name)(*args, **more), theirs(name)(*args, **more)
        assert got.dtype == want.dtype == torch.int32
        there = lengths.clamp(max=k)
        assert torch.equal((got >= 0).sum(1), there)
        assert torch.equal(got[:, -1] < 0, there < k)
        assert torch.equal(got.sort(dim=1).values, want.sort(dim=1).values), (name, [*more])
        short = lengths <= k  # These come in order, at both.
        assert torch.equal(got[short], want[short]), (name, [*more])
