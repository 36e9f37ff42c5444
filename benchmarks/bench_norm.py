# SPDX-License-Identifier: Apache-2.0
"""The norms: rows read and written once, in place with the residual for the fused ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from _harness import DTYPES, Case, arguments, run
from _peers import EPS

import precast
from precast.testing import packed_slice, poison

# Hidden sizes of Llama 8B and 70B; 5376 is Gemma 3 27B's.
RMSNORM = [(m, h) for h in (4096, 8192) for m in (1, 64, 1024, 16384)] + [(8192, 8192)]
FUSED_ADD = [(m, h) for h in (4096, 8192) for m in (1024, 16384)]
GEMMA = [(64, 5376), (16384, 5376)]
LAYERNORM = [(1024, 4096), (16384, 8192)]
# Queries of a packed projection with 32 query and 2 x 8 key/value heads of 128.
QK_TOKENS = (64, 16384)
HEADS, HEAD_DIM = (32, 8, 8), 128


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def _case(
    op: str,
    rows: int,
    hidden: int,
    tensors: int,
    make: Callable[[int, int], tuple[torch.Tensor, ...]],
    ours: Callable[..., object],
    itemsize: int = 2,
) -> Case:
    moved = tensors * rows * hidden * itemsize
    return Case(op, f"[{rows}, {hidden}]", moved, lambda: make(rows, hidden), ours)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def plain(rows: int, hidden: int) -> tuple[torch.Tensor, ...]:
        x = _randn(rows, hidden, dtype=dtype)
        return x, _randn(hidden, dtype=dtype), poison(torch.empty_like(x))

    def fused(rows: int, hidden: int) -> tuple[torch.Tensor, ...]:
        x, residual = (_randn(rows, hidden, dtype=dtype) for _ in range(2))
        return x, residual, _randn(hidden, dtype=dtype)

    def layer(rows: int, hidden: int) -> tuple[torch.Tensor, ...]:
        gamma, beta = (_randn(hidden, dtype=torch.float32) for _ in range(2))
        return _randn(rows, hidden, dtype=torch.bfloat16), gamma, beta

    for op, shapes in (("rmsnorm", RMSNORM), ("gemma_rmsnorm", GEMMA)):
        function = getattr(precast, op)
        for rows, hidden in shapes:
            yield _case(
                op, rows, hidden, 2, plain, lambda x, w, out, fn=function: fn(x, w, EPS, out)
            )
    for op, shapes in (("fused_add_rmsnorm", FUSED_ADD), ("gemma_fused_add_rmsnorm", GEMMA)):
        function = getattr(precast, op)
        for rows, hidden in shapes:
            yield _case(op, rows, hidden, 4, fused, lambda x, r, w, fn=function: fn(x, r, w, EPS))
    if dtype == torch.bfloat16:
        for rows, hidden in LAYERNORM:
            yield _case(
                "layernorm",
                rows,
                hidden,
                2,
                layer,
                lambda x, gamma, beta: precast.layernorm(x, gamma, beta, EPS),
            )
    for tokens in QK_TOKENS:

        def heads(tokens: int = tokens) -> tuple[torch.Tensor, ...]:
            x = packed_slice(tokens, HEADS, 0, HEAD_DIM, dtype=dtype)
            out = poison(torch.empty(x.shape, dtype=dtype, device="cuda"))
            return x, _randn(HEAD_DIM, dtype=dtype), out

        yield Case(
            "rmsnorm",
            f"[{tokens}, {HEADS[0]}, {HEAD_DIM}] of packed qkv",
            2 * tokens * HEADS[0] * HEAD_DIM * dtype.itemsize,
            heads,
            lambda x, w, out: precast.rmsnorm(x, w, EPS, out),
        )


if __name__ == "__main__":
    options = arguments(__doc__)
    run(cases(DTYPES[options.dtype]), options)
