# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a mixture of experts: the weights of each expert and adapter, read once.

Tokens are spread over adapters and experts so that every matrix is used, equally often: what a call
reads are then all of its weights, and copies of the arguments keep L2 cold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _harness import Case
from _script import script

from precast.fused_moe import (
    bgmv_moe_expand_reference,
    bgmv_moe_reference,
    bgmv_moe_shrink_reference,
    fill_w_ptr,
)

DTYPES = ("bf16", "f16")
SLICES = 2  # gate and up
#: What copies of the weights that tables name must exceed: L2 of the largest GPU, twice.
CACHE_BYTES = 256 << 20


class Shape(NamedTuple):
    tokens: int
    topk: int
    hidden: int
    columns: int  # of a slice
    rank: int
    adapters: int
    experts: int  # that are used

    @property
    def pairs(self) -> int:
        return self.tokens * self.topk

    @property
    def rows(self) -> int:
        """Rows of the matrices of both slices."""
        return SLICES * self.adapters * self.experts * self.rank

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, top-{self.topk}, {self.hidden} to {SLICES} x {self.columns}, "
            f"rank {self.rank}"
        )


#: Qwen3-30B-A3B with 128 experts, and layers of 4096 columns with 32.
SHAPES = (
    Shape(1, 8, 2048, 768, 16, 1, 8),
    Shape(8, 8, 2048, 768, 16, 4, 16),
    Shape(64, 8, 2048, 768, 16, 4, 128),
    Shape(64, 8, 2048, 768, 64, 4, 128),
    Shape(1024, 8, 2048, 768, 16, 4, 128),
    Shape(1, 4, 4096, 2688, 32, 1, 4),
    Shape(64, 4, 4096, 2688, 32, 4, 32),
)


class Made(NamedTuple):
    """The arguments of a call."""

    x: torch.Tensor
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    tokens: torch.Tensor
    experts: torch.Tensor
    loras: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype) -> Made:
        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, dtype=dtype, device="cuda")

        x = normal(shape.tokens, shape.hidden)
        tokens = torch.arange(shape.tokens, device=x.device)
        slots = torch.arange(shape.topk, device=x.device)
        experts = tokens[:, None] // shape.adapters * shape.topk + slots
        sizes = shape.adapters, shape.experts
        return cls(
            x,
            [normal(*sizes, shape.rank, shape.hidden) for _ in range(SLICES)],
            [normal(*sizes, shape.columns, shape.rank) for _ in range(SLICES)],
            tokens.repeat_interleave(shape.topk),
            (experts % shape.experts).flatten().contiguous(),
            tokens % shape.adapters,
            torch.rand(shape.pairs, device=x.device),
        )


class Tables:
    """Tables of equal weights at different addresses, of which every call takes the next."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        count = math.ceil(CACHE_BYTES / sum(w.nbytes for w in weights))
        self.weights = [[w.clone() for w in weights] for _ in range(max(count, 2))]
        self.stride, experts = weights[0].stride(0), weights[0].shape[1]
        tables = []
        for copy in self.weights:
            tables.append(copy[0].new_zeros(len(copy), experts, dtype=torch.int64))
            for i, w in enumerate(copy):
                fill_w_ptr(tables[-1], w, experts, i)
        self._next = itertools.cycle(tables)

    def take(self) -> tuple[torch.Tensor, int]:
        return next(self._next), self.stride


def whole(shape: Shape, dtype: torch.dtype) -> tuple[Any, ...]:
    m = Made.of(shape, dtype)
    return m.x, *m.a, *m.b, m.tokens, m.experts, m.loras, m.weights


def bind_whole(route: Callable[..., Any], shape: Shape) -> Callable[..., Any]:
    def call(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        a, b, routed = rest[:SLICES], rest[SLICES : 2 * SLICES], rest[2 * SLICES :]
        return route(x, a, b, *routed, shape.experts)

    return call


def shrink_call(shape: Shape, dtype: torch.dtype) -> tuple[Any, ...]:
    m = Made.of(shape, dtype)
    y = m.x.new_zeros(SLICES, shape.pairs, shape.rank)
    return y, m.x, m.tokens, m.experts, m.loras, Tables(m.a)


def bind_shrink(route: Callable[..., Any]) -> Callable[..., Any]:
    def call(y: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        *routed, tables = rest
        table, stride = tables.take()
        return route(y, x, table, *routed, stride)

    return call


def expand_call(shape: Shape, dtype: torch.dtype) -> tuple[Any, ...]:
    m = Made.of(shape, dtype)
    y = m.weights.new_zeros(shape.tokens, SLICES * shape.columns)
    x = torch.randn(SLICES, shape.pairs, shape.rank, dtype=dtype, device="cuda")
    starts = torch.arange(SLICES, device=y.device) * shape.columns
    return y, x, m.tokens, m.experts, m.weights, m.loras, starts, Tables(m.b)


def bind_expand(route: Callable[..., Any], shape: Shape) -> Callable[..., Any]:
    sizes = [shape.columns] * SLICES

    def call(y: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        *routed, tables = rest
        table, stride = tables.take()
        return route(y, x, table, *routed, sizes, stride)

    return call


def in_place(reference: Callable[..., torch.Tensor]) -> Callable[..., None]:
    def run(y: torch.Tensor, *rest: Any) -> None:
        y.copy_(reference(y, *rest))

    return run


def cases(dtype: torch.dtype) -> Iterator[Case]:
    item = dtype.itemsize
    for shape in SHAPES:
        of_a, of_b = (shape.rows * n * item for n in (shape.hidden, shape.columns))
        of_x = shape.tokens * shape.hidden * item
        middle = SLICES * shape.pairs * shape.rank * item
        numbers = shape.tokens * SLICES * shape.columns

        def of_whole(route: Callable[..., Any], shape: Shape = shape) -> Callable[..., Any]:
            return bind_whole(route, shape)

        def of_expand(route: Callable[..., Any], shape: Shape = shape) -> Callable[..., Any]:
            return bind_expand(route, shape)

        yield Case(
            "bgmv_moe",
            str(shape),
            of_a + of_b + of_x + numbers * item,
            lambda shape=shape: whole(shape, dtype),
            of_whole,
            of_whole(bgmv_moe_reference),
        )
        yield Case(
            "bgmv_moe_shrink",
            str(shape),
            of_a + of_x + 2 * middle,
            lambda shape=shape: shrink_call(shape, dtype),
            bind_shrink,
            bind_shrink(in_place(bgmv_moe_shrink_reference)),
        )
        yield Case(
            "bgmv_moe_expand",
            str(shape),
            of_b + middle + 2 * numbers * 4,
            lambda shape=shape: expand_call(shape, dtype),
            of_expand,
            of_expand(in_place(bgmv_moe_expand_reference)),
        )


if __name__ == "__main__":
    script(__file__)
