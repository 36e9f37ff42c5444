# SPDX-License-Identifier: Apache-2.0
"""Top-k in reference mode, by plain Python: order, ties, windows, pages, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast import topk
from precast._ops.topk._common import MAX_COLUMNS
from precast.topk import TopKTieBreak

NAN = float("nan")

pytestmark = pytest.mark.usefixtures("reference_mode")


def largest(row: list[float], k: int, tie_break: int = 0) -> list[int]:
    """Positions of the k largest, the largest first; NaN is larger than all."""
    sign = -1 if tie_break == TopKTieBreak.LARGE else 1

    def rank(at: int) -> tuple[bool, float, int]:
        x = row[at]
        return (x == x, 0.0 if x != x else -x, sign * at)

    return sorted(range(len(row)), key=rank)[:k]


def scores(rows: int, size: int, kind: str) -> torch.Tensor:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    if kind == "ties":
        x = x.round()
    elif kind == "special":
        x = x.where(x < 1, NAN).where(x > -1, -torch.inf)
        x[:, :2] = torch.tensor([0.0, -0.0])
    return x


kinds = pytest.mark.parametrize("kind", ["normal", "ties", "special"])
tie_breaks = pytest.mark.parametrize("tie_break", list(TopKTieBreak))


@kinds
@tie_breaks
@pytest.mark.parametrize(("size", "k"), [(1, 1), (7, 7), (50, 1), (200, 64)])
def test_the_k_largest(kind: str, tie_break: TopKTieBreak, size: int, k: int) -> None:
    x = scores(5, size, kind) if size > 2 else torch.ones(5, size)
    values, indices = precast.top_k(x, k, tie_break=tie_break)
    ordered, places = precast.top_k(x, k, sorted=True, tie_break=tie_break)
    assert (indices.dtype, values.dtype) == (torch.int64, x.dtype)
    for row, mine, sorted_places in zip(x.tolist(), indices.tolist(), places.tolist()):
        want = largest(row, k, tie_break)
        assert mine == sorted(want)
        assert sorted(sorted_places) == sorted(want)
        # Of those that are equal, the first comes first.
        chosen = [row[at] for at in sorted(want)]
        assert sorted_places == [sorted(want)[i] for i in largest(chosen, k)]
    for found, at in ((values, indices), (ordered, places)):
        assert torch.equal(found.nan_to_num(9e9), x.gather(1, at).nan_to_num(9e9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_element_types_and_names(dtype: torch.dtype) -> None:
    x = scores(3, 40, "normal").to(dtype)
    values, indices = topk.topk(x, 4, sorted=True)
    assert values.dtype == dtype
    assert torch.equal(values, x.topk(4).values)
    assert torch.equal(x.gather(1, indices), values)
    assert precast.top_k(torch.empty(0, 9), 3)[1].shape == (0, 3)
    assert [f"{tie}" for tie in TopKTieBreak] == ["none", "small", "large"]
    assert isinstance(topk.can_implement_filtered_topk(), bool)


def windows(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths and starts of rows: none, few, all, up to the end."""
    lengths = torch.tensor([0, 1, 3, size, size - 2, size // 2], dtype=torch.int32)
    starts = torch.tensor([0, 5, size - 3, 0, 2, size // 4], dtype=torch.int32)
    return lengths, starts


@kinds
@tie_breaks
@pytest.mark.parametrize("k", [1, 4, 30, 100])
@pytest.mark.parametrize("with_starts", [False, True])
def test_positions_in_ragged_and_paged_caches(
    kind: str, tie_break: TopKTieBreak, k: int, with_starts: bool
) -> None:
    size, page = 60, 8
    x = scores(6, size, kind)
    lengths, starts = windows(size)
    first = starts if with_starts else torch.zeros_like(starts)
    offsets = torch.arange(6, dtype=torch.int32) * 1000
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1)).int().view(4, 10)
    batch = torch.tensor([3, 0, 1, 1, 2, 3], dtype=torch.int32)
    page_starts = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    rows = []
    for row, length, start in zip(x.tolist(), lengths.tolist(), first.tolist()):
        rows.append(sorted(largest(row[start : start + length], k, tie_break)))
    own = {"row_starts": starts} if with_starts else {}
    ragged = precast.top_k_ragged_transform(x, offsets, lengths, k, tie_break=tie_break, **own)
    raw = torch.zeros(6, k, dtype=torch.int32)
    paged = precast.top_k_page_table_transform(
        *(x, table, lengths, k, batch),
        tie_break=tie_break,
        page_table_row_starts=page_starts,
        page_size=page,
        out_raw_indices=raw,
        **own,
    )
    assert ragged.dtype == paged.dtype == torch.int32
    for i, want in enumerate(rows):
        padding = [-1] * (k - len(want))
        assert ragged[i].tolist() == [1000 * i + at for at in want] + padding
        assert raw[i].tolist() == want + padding
        pages = [int(table[batch[i], int(page_starts[i]) + at // page]) for at in want]
        physical = [p * page + at % page for p, at in zip(pages, want)]
        assert paged[i].tolist() == physical + padding


def test_pages_of_one_score_start_where_the_scores_do() -> None:
    x = torch.tensor([[9.0, 1.0, 3.0, 2.0]])
    table = torch.tensor([[40, 41, 42, 43]], dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    out = torch.empty(1, 2, dtype=torch.int32)
    call = precast.top_k_page_table_transform
    assert call(x, table, 3 * one, 2, row_starts=one, out=out) is out
    assert out.tolist() == [[42, 43]]
    with pytest.raises(ValueError, match="page_table_row_starts is required"):
        call(x, table, 3 * one, 2, row_starts=one, page_size=2)


def test_what_is_rejected() -> None:
    x, one = torch.ones(2, 5), torch.ones(2, dtype=torch.int32)
    table, wide = torch.zeros(2, 5, dtype=torch.int32), torch.ones(1, 1).expand(1, (1 << 20) + 1)
    ragged, paged = precast.top_k_ragged_transform, precast.top_k_page_table_transform
    over = (1 << 20) + 1
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (precast.top_k, (x, 0), {}, "top_k: k must be at least 1, got 0"),
        (precast.top_k, (x, -3), {}, "top_k: k must be at least 1, got -3"),
        (precast.top_k, (x, 6), {}, "k must be at most input's 5 columns, got 6"),
        (precast.top_k, (x, over), {}, "top_k: k must be at most 1048576, got 1048577"),
        (ragged, (x, one, one, over), {}, "top_k_ragged_transform: k must be at most 1048576, got"),
        (paged, (x, table, one, over), {}, "table_transform: k must be at most 1048576, got"),
        (precast.top_k, (wide, 1), {}, "input must have at most 1048576 columns, got shape"),
        (precast.top_k, (x, 2), {"tie_break": 3}, "tie_break must be 0, 1 or 2, got 3"),
        (precast.top_k, (x.double(), 2), {}, "input must be float32 or float16 or bfloat16"),
        (precast.top_k, (x[0], 2), {}, r"input must have 2 dimensions, got shape \[5\]"),
        (ragged, (x, one[:1], one, 2), {}, r"offsets must have shape \[2\], got \[1\]"),
        (ragged, (x, one, one.long(), 2), {}, "lengths must be int32, got int64"),
        (paged, (x, table[:1], one, 2), {}, "src_page_table must have a row for each"),
        (paged, (x, table.long(), one, 2), {}, "src_page_table must be int32, got int64"),
        (paged, (x, table, one, 2), {"page_size": 3}, "page_size must be a positive power of two"),
        (paged, (x, table, one, 2), {"out": table}, r"out must have shape \[2, 2\], got \[2, 5\]"),
    ]
    for call, args, more, words in calls:
        with pytest.raises(ValueError, match=words):
            call(*args, **more)
    with pytest.raises(TypeError, match=r"top_k: input must be a torch\.Tensor, got list"):
        precast.top_k([[1.0]], 1)  # type: ignore[arg-type]


def test_the_most_that_is_chosen_is_what_the_kernels_choose() -> None:
    x = torch.randn(1, 9000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(precast.top_k(x, 8999, sorted=True)[0], x.topk(8999).values)
    one = torch.ones(1, dtype=torch.int32)
    assert precast.top_k_ragged_transform(x, one, one, MAX_COLUMNS).shape == (1, MAX_COLUMNS)
    headers = Path(__file__).resolve().parents[3] / "include" / "precast"
    text = "".join(path.read_text() for path in sorted((headers / "topk").glob("*.cuh")))
    assert f"constexpr int kIndexBits = {MAX_COLUMNS.bit_length() - 1};" in text


def test_windows_end_with_their_rows() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0]]).expand(5, -1)
    starts = torch.tensor([-2, 1, 2, 3, 9], dtype=torch.int32)
    lengths = torch.tensor([2, 9, 9, 9, -1], dtype=torch.int32)
    offsets = torch.full((5,), 100, dtype=torch.int32)
    got = precast.top_k_ragged_transform(x, offsets, lengths, 2, row_starts=starts)
    assert got.tolist() == [[100, 101], [100, 101], [100, -1], [-1, -1], [-1, -1]]


def test_pages_that_are_not_there_are_rejected() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0, 4.0]])
    table, one = torch.tensor([[7, 5]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    call = precast.top_k_page_table_transform
    assert call(x, table, 4 * one, 4, page_size=2).tolist() == [[14, 15, 10, 11]]
    assert call(x, table, 2 * one, 4).tolist() == [[7, 5, -1, -1]]
    rows = r"row_to_batch must be from 0 to 0, as there are 1 rows of src_page_table, got "
    for batch in (1, -1):
        with pytest.raises(IndexError, match=f"{rows}{batch}$"):
            call(x, table, 2 * one, 4, batch * one)
        assert call(x, table, 0 * one, 4, batch * one).tolist() == [[-1] * 4]
    pages = r"the page of a position must be from 0 to 1, .* 2 columns of src_page_table, got "
    for more, page in (
        ({}, 2),
        ({"page_table_row_starts": one * 2}, 2),
        ({"row_starts": -one}, -1),
    ):
        with pytest.raises(IndexError, match=f"{pages}{page}$"):
            call(x, table, 3 * one, 4, **more)
