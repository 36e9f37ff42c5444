# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: four residual streams read, and one or four written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.mhc import (
    mhc_post_reference,
    mhc_pre_big_fuse_reference,
    mhc_pre_big_fuse_with_prenorm_reference,
)

DTYPES = ("bf16",)
SHAPES = ((1, 4096), (64, 4096), (4096, 4096), (1, 7168), (64, 7168), (1024, 7168), (8192, 7168))
MIXES = 24


def _fresh(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    streams = torch.randn(tokens, 4, hidden, dtype=dtype, device="cuda")
    weights = (torch.randn(*shape, device="cuda") for shape in ((tokens, MIXES), (3,), (MIXES,)))
    return streams, *weights


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, hidden in SHAPES:

        def post(tokens: int = tokens, hidden: int = hidden) -> tuple[Any, ...]:
            streams, mixes, _, _ = _fresh(tokens, hidden, dtype)
            x = torch.randn(tokens, hidden, dtype=dtype, device="cuda")
            post, comb = mixes[:, :4].contiguous(), mixes[:, 8:].contiguous()
            return x, streams, post, comb.view(tokens, 4, 4)

        def pre(tokens: int = tokens, hidden: int = hidden) -> tuple[Any, ...]:
            streams, mixes, scale, base = _fresh(tokens, hidden, dtype)
            squares = streams.float().square().sum(dim=(1, 2))
            return mixes, squares, streams, scale, base, 4 * hidden

        def prenorm(tokens: int = tokens, hidden: int = hidden) -> tuple[Any, ...]:
            streams, mixes, scale, base = _fresh(tokens, hidden, dtype)
            return mixes, streams, scale, base

        numbers = tokens * hidden * dtype.itemsize
        weights = tokens * MIXES * 4
        # The op, rows of `hidden` that are moved, bytes besides, arguments, plain PyTorch.
        kinds: list[tuple[str, int, int, Any, Any]] = [
            ("mhc_post", 9, weights, post, mhc_post_reference),
            ("mhc_pre_big_fuse", 5, 2 * weights, pre, mhc_pre_big_fuse_reference),
            (
                "mhc_pre_big_fuse_with_prenorm",
                5,
                2 * weights,
                prenorm,
                mhc_pre_big_fuse_with_prenorm_reference,
            ),
        ]
        for op, rows, more, make, eager in kinds:
            yield Case(
                op,
                f"[{tokens}, 4, {hidden}]",
                rows * numbers + more,
                make,
                bind=lambda function: lambda *args: function(*args),
                eager=eager,
            )


if __name__ == "__main__":
    script(__file__)
