# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of products on the kernels for every GPU share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _harness import Case

from precast.testing import Tolerance, poison

#: Experts of a GPU.
GROUPS = 8

Make = Callable[[], tuple[Any, ...]]


def output(*shape: int) -> torch.Tensor:
    return poison(torch.empty(shape, dtype=torch.bfloat16, device="cuda"))


def starts(tokens: int) -> torch.Tensor:
    """Where groups of so many tokens begin."""
    bounds = torch.empty(GROUPS + 1, dtype=torch.int32, device="cuda")
    return bounds.copy_(torch.arange(GROUPS + 1) * tokens)


def case_of(
    op: str,
    shape: tuple[int, int, int, int],
    itemsize: int,
    close: Tolerance,
    make: Make,
    bind: Any,
    eager: Any,
    out: int,
) -> Case:
    """A product of so many matrices with rows, columns and depth; `out` is an argument."""
    batch, rows, columns, depth = shape
    label = f"[{rows}, {depth}] x [{depth}, {columns}]"
    return Case(
        op,
        label if batch == 1 else f"{batch} x {label}",
        batch * (itemsize * depth * (rows + columns) + 2 * rows * columns),
        make,
        bind=bind,
        eager=eager,
        tolerances={out: close},
        close=close,
        flops=2 * batch * rows * columns * depth,
    )
