# SPDX-License-Identifier: Apache-2.0
"""The largest scores of windows as positions in ragged and paged caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import precast
from precast.topk import (
    top_k_page_table_transform_reference,
    top_k_ragged_transform_reference,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(1, 1), (4, 2), (5, 33), (3, 77), (9, 1025), (16, 4096), (50, 20000), (133, 65537)]
SHAPES += [(300, 9001), (2, 1000000), (2, 1 << 20)]
COUNTS = (1, 50, 512, 2048, 8192, 9000, 70000)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f16", "bf16"])
shapes = pytest.mark.parametrize(("rows", "size"), SHAPES)


def _int32(low: int, high: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randint(low, high, (rows,), device="cuda", generator=generator)
    return drawn.to(torch.int32)


def _scores(
    rows: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> list[torch.Tensor]:
    """Random ones and ones with many ties, rows at odd addresses."""
    x = torch.randn(rows, size, device="cuda", generator=generator)
    wide = torch.full((rows, size + 5), torch.nan, device="cuda", dtype=dtype)
    wide[:, 3 : size + 3] = x
    special = x.where(x < 1, torch.nan).where(x > -1, -torch.inf)
    special[0] = -torch.inf
    special[-1] = torch.nan
    return [x.to(dtype), x.round().to(dtype), special.to(dtype), wide[:, 3 : size + 3]]


def _windows(
    rows: int, size: int, generator: torch.Generator
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Lengths and starts: empty windows, whole rows, and any."""
    any_length = _int32(0, size + 1, rows, generator)
    any_length[0] = size
    any_length[-1] = 0
    starts = _int32(0, size, rows, generator)
    lengths = torch.minimum(_int32(0, size + 1, rows, generator), size - starts)
    return [(any_length, None), (torch.full_like(starts, size), None), (lengths, starts)]


def _same(got: torch.Tensor, want: torch.Tensor, ordered: bool) -> None:
    assert got.dtype == torch.int32
    if not ordered:
        assert torch.equal(got < 0, want < 0)
        got, want = got.sort(dim=1).values, want.sort(dim=1).values
    assert torch.equal(got, want), f"{(got != want).sum().item()} of {got.numel()}"


@dtypes
@shapes
def test_ragged(rows: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    offsets = _int32(0, 1 << 30, rows, generator)
    for x in _scores(rows, size, dtype, generator):
        for lengths, starts in _windows(rows, size, generator):
            for k in COUNTS:
                for tie_break in (0, 2):
                    want = top_k_ragged_transform_reference(
                        x, offsets, lengths, k, tie_break, starts
                    )
                    for deterministic in (False, True):
                        got = precast.top_k_ragged_transform(
                            *(x, offsets, lengths, k, deterministic, tie_break),
                            row_starts=starts,
                        )
                        _same(got, want, deterministic)


@dtypes
@shapes
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_paged(
    rows: int, size: int, page_size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    pages = -(-size // page_size) + 9
    pages += size if page_size == 1 else 0  # Pages start where scores do.
    count = (1 << 31) // page_size - 1
    for batch, rows_of in ((rows + 2, None), (3, _int32(0, 3, rows, generator))):
        wide = torch.randint(0, count, (batch, pages + 2), device="cuda", generator=generator)
        table = wide.to(torch.int32)[:, 1:-1]
        for x in _scores(rows, size, dtype, generator)[1:]:
            for lengths, starts in _windows(rows, size, generator):
                first = _int32(0, 9, rows, generator)
                needed = starts is not None and page_size > 1
                for page_starts in [first] if needed else [None, first]:
                    k = COUNTS[int(torch.randint(0, len(COUNTS), ()))]
                    more = {"row_starts": starts, "page_table_row_starts": page_starts}
                    want = top_k_page_table_transform_reference(
                        x, table, lengths, k, rows_of, 1, page_size=page_size, **more
                    )
                    places = precast.top_k_ragged_transform(
                        *(x, torch.zeros_like(lengths), lengths, k, True, 1), row_starts=starts
                    )
                    for deterministic in (False, True):
                        out, raw = torch.full((2, rows, k), -9, device="cuda", dtype=torch.int32)
                        got = precast.top_k_page_table_transform(
                            *(x, table, lengths, k, rows_of, deterministic, 1),
                            **more,
                            page_size=page_size,
                            out=out,
                            out_raw_indices=raw,
                        )
                        assert got is out
                        _same(got, want, deterministic)
                        _same(raw, places, deterministic)
                    got = precast.top_k_page_table_transform(
                        *(x, table, lengths, k, rows_of, True, 1), **more, page_size=page_size
                    )
                    _same(got, want, True)


def test_windows_that_reach_beyond_their_rows(generator: torch.Generator) -> None:
    """They begin and end within them."""
    x = torch.randn(6, 3000, device="cuda", generator=generator)
    starts = torch.tensor([-5, 0, 2990, 3000, 9000, 10], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([20, 9000, 50, 7, 7, -3], device="cuda", dtype=torch.int32)
    offsets = torch.zeros_like(starts)
    for k in (1, 8, 500, 4000):
        want = top_k_ragged_transform_reference(x, offsets, lengths, k, row_starts=starts)
        got = precast.top_k_ragged_transform(x, offsets, lengths, k, True, row_starts=starts)
        _same(got, want, True)
    assert want[0, :20].tolist() == [*range(20)]
    assert (want[3:] == -1).all()


def test_short_windows_come_in_order(generator: torch.Generator) -> None:
    """Without an order asked for, too, positions of a window of at most k scores ascend."""
    x = torch.randn(5, 5000, device="cuda", generator=generator)
    lengths = torch.tensor([0, 1, 100, 511, 512], device="cuda", dtype=torch.int32)
    got = precast.top_k_ragged_transform(x, torch.zeros_like(lengths), lengths, 512)
    places = torch.arange(512, device="cuda", dtype=torch.int32).expand(5, -1)
    assert torch.equal(got, places.where(places < lengths[:, None], -1))


def test_no_rows() -> None:
    x, none = torch.empty(0, 50, device="cuda"), torch.empty(0, device="cuda", dtype=torch.int32)
    assert precast.top_k_ragged_transform(x, none, none, 7).shape == (0, 7)
    table = torch.empty(0, 5, device="cuda", dtype=torch.int32)
    assert precast.top_k_page_table_transform(x, table, none, 7).shape == (0, 7)


def test_replays_of_a_graph_follow_the_lengths(generator: torch.Generator) -> None:
    x = torch.randn(40, 30000, device="cuda", generator=generator)
    lengths, offsets = (_int32(0, 30001, 40, generator) for _ in range(2))
    precast.top_k_ragged_transform(x, offsets, lengths, 2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = precast.top_k_ragged_transform(x, offsets, lengths, 2048, True)
    for _ in range(4):
        lengths.copy_(_int32(0, 30001, 40, generator))
        x.copy_(torch.randn(40, 30000, device="cuda", generator=generator))
        graph.replay()
        assert torch.equal(got, top_k_ragged_transform_reference(x, offsets, lengths, 2048))


def _ragged(x: torch.Tensor, **change: Any) -> Any:
    n = torch.zeros(4, device="cuda", dtype=torch.int32)
    given = {"offsets": n, "lengths": n, "k": 3, **change}
    return precast.top_k_ragged_transform(x, **given)


def _paged(x: torch.Tensor, **change: Any) -> Any:
    n = torch.zeros(4, device="cuda", dtype=torch.int32)
    table = torch.zeros(4, 10, device="cuda", dtype=torch.int32)
    given = {"src_page_table": table, "lengths": n, "k": 3, **change}
    return precast.top_k_page_table_transform(x, **given)


N3, N4 = (torch.zeros(n, dtype=torch.int32) for n in (3, 4))
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (_ragged, {"lengths": N3}, r"lengths must have shape \[4\], got \[3\]"),
    (_ragged, {"offsets": N4.long()}, "offsets must be int32, got int64"),
    (_ragged, {"row_starts": N4.float()}, "row_starts must be int32, got float32"),
    (_ragged, {"k": 1048577}, "k must be at most 1048576, got 1048577"),
    (_ragged, {"k": 0}, "k must be at least 1, got 0"),
    (_ragged, {"tie_break": 7}, "tie_break must be 0, 1 or 2, got 7"),
    (_paged, {"src_page_table": N4}, "src_page_table must have 2 dimensions"),
    (_paged, {"src_page_table": N4[None].long()}, "src_page_table must be int32"),
    (_paged, {"src_page_table": N4[None]}, "src_page_table must have a row for each of input's 4"),
    (_paged, {"row_to_batch": N3}, r"row_to_batch must have shape \[4\], got \[3\]"),
    (_paged, {"page_size": 3}, "page_size must be a positive power of two"),
    (_paged, {"page_size": 2, "row_starts": N4}, "page_table_row_starts is required"),
    (_paged, {"out": N4[:, None]}, r"out must have shape \[4, 3\]"),
    (_paged, {"out_raw_indices": torch.zeros(4, 3)}, "out_raw_indices must be int32"),
]


@pytest.mark.parametrize(("call", "change", "words"), REFUSED)
def test_what_is_rejected(call: Callable[..., Any], change: dict[str, Any], words: str) -> None:
    on_gpu = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=words):
        call(torch.ones(4, 10, device="cuda"), **on_gpu)


def test_outputs_are_contiguous_and_apart() -> None:
    out = torch.zeros(4, 3, device="cuda", dtype=torch.int32)
    with pytest.raises(ValueError, match="out must be contiguous"):
        _paged(torch.ones(4, 10, device="cuda"), out=out[:, :1].expand(4, 3))
    with pytest.raises(ValueError, match="out_raw_indices must not overlap out's memory"):
        _paged(torch.ones(4, 10, device="cuda"), out=out, out_raw_indices=out)
