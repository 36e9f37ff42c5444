# SPDX-License-Identifier: Apache-2.0
"""RMSNorm gated into a float32 residual: 16 and 32 bits read, 32 written, and 16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.norm import gated_residual_next_rmsnorm_reference, gated_residual_rmsnorm_reference
from precast.testing import poison

DTYPES = ("bf16",)
SHAPES = ((1, 8192), (64, 8192), (512, 8192), (8192, 8192), (16384, 4096))


def _eager(*args: Any) -> torch.Tensor:
    return args[-1].copy_(gated_residual_rmsnorm_reference(*args[:5]))


def _eager_next(*args: Any) -> tuple[torch.Tensor, ...]:
    results = gated_residual_next_rmsnorm_reference(*args[:5])
    return tuple(target.copy_(result) for target, result in zip(args[-2:], results))


def _bind(norm: Any) -> Any:
    return lambda *args: norm(*args[:5], 1e-6, 0.0, args[5])


def _bind_next(norm: Any) -> Any:
    return lambda *args: norm(*args[:5], 1e-6, 1e-6, 0.0, *args[5:])


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, hidden in SHAPES:

        def make(rows: int = rows, hidden: int = hidden) -> tuple[Any, ...]:
            branch = torch.randn(rows, hidden, dtype=dtype, device="cuda")
            residual = torch.randn(rows, hidden, device="cuda")
            weight = torch.randn(hidden, dtype=dtype, device="cuda")
            alpha, beta = (torch.randn(hidden, device="cuda") for _ in range(2))
            return branch, residual, weight, alpha, beta, poison(torch.empty_like(residual))

        def make_next(rows: int = rows, hidden: int = hidden) -> tuple[Any, ...]:
            given = make(rows, hidden)
            return (*given, poison(torch.empty_like(given[0])))

        numbers = rows * hidden
        for op, width, arguments, bind, eager in (
            ("gated_residual_rmsnorm", 8 + dtype.itemsize, make, _bind, _eager),
            (
                "gated_residual_next_rmsnorm",
                8 + 2 * dtype.itemsize,
                make_next,
                _bind_next,
                _eager_next,
            ),
        ):
            shape = f"[{rows}, {hidden}]"
            yield Case(op, shape, numbers * width, arguments, bind=bind, eager=eager)


if __name__ == "__main__":
    script(__file__)
