# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of each token's experts: the kernel in CUDA and the one in CuTe DSL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.fused_moe import moe_finalize_reference
from precast.testing import poison

DTYPES = ("bf16", "f16")
BACKENDS = ("cuda", "cute_dsl")
TOPK = 8
#: Tokens and columns: Qwen3-30B-A3B and DeepSeek-V3.
SHAPES = ((1, 2048), (64, 2048), (4096, 2048), (1, 7168), (64, 7168), (4096, 7168))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, columns in SHAPES:
        least = tokens * ((TOPK + 1) * columns * dtype.itemsize + 8 * TOPK)

        def make(tokens: int = tokens, columns: int = columns) -> tuple[torch.Tensor, ...]:
            rows = torch.randn(tokens * TOPK, columns, dtype=dtype, device="cuda")
            places = torch.randperm(tokens * TOPK, device=rows.device).int().view(tokens, TOPK)
            weights = torch.rand(tokens, TOPK, device=rows.device)
            out = poison(torch.empty(tokens, columns, dtype=dtype, device="cuda"))
            return rows, places, weights, out

        for backend in BACKENDS:

            def bind(fn: Callable[..., Any], backend: str = backend) -> Callable[..., Any]:
                return lambda rows, places, weights, out: fn(
                    rows, places, weights, out=out, backend=backend
                )

            yield Case(
                "moe_finalize",
                f"{tokens} tokens, {TOPK} of [{tokens * TOPK}, {columns}], {backend}",
                least,
                make,
                bind,
                eager=lambda rows, places, weights, out: moe_finalize_reference(
                    rows, places, weights
                ),
            )


if __name__ == "__main__":
    script(__file__)
