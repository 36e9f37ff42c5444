# SPDX-License-Identifier: Apache-2.0
"""The k largest elements of each row, also as positions for sparse attention.

Rows have the length of a vocabulary or of a long context. The order within a result is not fixed,
as in engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.topk import (
    top_k_page_table_transform_reference,
    top_k_ragged_transform_reference,
    top_k_varlen_reference,
)

DTYPES = ("f32", "bf16", "f16")
SHAPES = ((1, 128256), (16, 128256), (64, 128256), (256, 128256), (64, 65536))
COUNTS = (50, 256, 2048)
LARGE_K = (16, 128256, 16384)  # rows, size and a k that one CTA cannot sort
QUERIES = ((1, 65536), (64, 65536), (256, 131072))
CHOSEN = 2048  # of a query's scores


def _values(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Which of equal elements are chosen is open, too."""
    return results[0].float().sort(dim=1).values


def _positions(result: torch.Tensor) -> torch.Tensor:
    return result.sort(dim=1).values


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Rows of ``dtype``."""
    for rows, size in SHAPES:
        for k in COUNTS:
            yield _top_k(rows, size, k, dtype)
    yield _top_k(*LARGE_K, dtype)
    for rows, size in QUERIES:
        yield _ragged(rows, size, dtype)
        yield _paged(rows, size, dtype)
        yield _varlen(rows, size, dtype)


def _scores(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, size, device="cuda").to(dtype)


def _different(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Scores of which one set is the largest: these lie a quarter above where they would lie."""
    x = _scores(rows, size, torch.float32)
    places = x.topk(CHOSEN).indices
    return x.scatter_add(1, places, torch.full_like(x[:, :CHOSEN], 0.25)).to(dtype)


def _top_k(rows: int, size: int, k: int, dtype: torch.dtype) -> Case:
    def bind(function: Any) -> Any:
        return lambda x: function(x, k)

    return Case(
        "top_k",
        f"[{rows}, {size}] k {k}",
        rows * (size * dtype.itemsize + k * (dtype.itemsize + 8)),
        lambda: (_scores(rows, size, dtype),),
        bind=bind,
        eager=lambda x: tuple(x.topk(k, sorted=False)),
        whole=bind,
        tidy=_values,
    )


def _ragged(rows: int, size: int, dtype: torch.dtype) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        x = _different(rows, size, dtype)
        lengths = torch.full((rows,), size, dtype=torch.int32, device=x.device)
        return x, lengths.cumsum(0).to(torch.int32) - size, lengths

    def bind(function: Any) -> Any:
        return lambda x, offsets, lengths: function(x, offsets, lengths, CHOSEN)

    return Case(
        "top_k_ragged_transform",
        f"[{rows}, {size}] k {CHOSEN}",
        rows * (size * dtype.itemsize + CHOSEN * 4),
        make,
        bind=bind,
        eager=bind(top_k_ragged_transform_reference),
        whole=bind,
        tidy=_positions,
    )


def _paged(rows: int, size: int, dtype: torch.dtype) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        x = _different(rows, size, dtype)
        lengths = torch.full((rows,), size, dtype=torch.int32, device=x.device)
        table = torch.randperm(rows * size, device=x.device).to(torch.int32).view(rows, size)
        return x, table, lengths

    def bind(function: Any) -> Any:
        return lambda x, table, lengths: function(x, table, lengths, CHOSEN)

    return Case(
        "top_k_page_table_transform",
        f"[{rows}, {size}] k {CHOSEN}",
        rows * (size * dtype.itemsize + CHOSEN * 8),
        make,
        bind=bind,
        eager=bind(top_k_page_table_transform_reference),
        whole=bind,
        tidy=_positions,
    )


def _varlen(rows: int, size: int, dtype: torch.dtype) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        x = _different(rows, size, dtype)
        return x, torch.full((rows,), size, dtype=torch.int32, device=x.device)

    def bind(function: Any) -> Any:
        return lambda x, lengths: function(x, lengths, CHOSEN)[0]

    return Case(
        "top_k_varlen",
        f"[{rows}, {size}] k {CHOSEN}",
        rows * (size * dtype.itemsize + CHOSEN * 4),
        make,
        bind=bind,
        eager=lambda x, lengths: top_k_varlen_reference(x, lengths, CHOSEN),
        whole=bind,
        tidy=_positions,
    )


if __name__ == "__main__":
    script(__file__)
