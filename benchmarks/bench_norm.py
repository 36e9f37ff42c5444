# SPDX-License-Identifier: Apache-2.0
"""The norms: rows read and written once, in place with the residual for the fused ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _script import script
from torch.nn import functional

from precast.testing import packed_slice, poison

EPS = 1e-6
# Hidden sizes of Llama 8B and 70B; 5376 is Gemma 3 27B's.
RMSNORM = [(m, h) for h in (4096, 8192) for m in (1, 64, 1024, 16384)] + [(8192, 8192)]
FUSED_ADD = [(m, h) for h in (4096, 8192) for m in (1024, 16384)]
GEMMA = [(64, 5376), (16384, 5376)]
LAYERNORM = [(1024, 4096), (16384, 8192)]
# Queries of a packed projection with 32 query and 2 x 8 key/value heads of 128.
QK_TOKENS = (64, 16384)
HEADS, HEAD_DIM = (32, 8, 8), 128

Function = Callable[..., Any]


def _norm(fn: Function) -> Function:
    return lambda x, w, out: fn(x, w, EPS, out)


def _fused(fn: Function) -> Function:
    return lambda x, residual, w: fn(x, residual, w, EPS)


def _layer(fn: Function) -> Function:
    return lambda x, gamma, beta: fn(x, gamma, beta, EPS)


def _eager_norm(bias: float) -> Function:
    def rmsnorm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), w + bias if bias else w, EPS)

    return rmsnorm


def _eager_fused(bias: float) -> Function:
    def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> None:
        residual.add_(x)
        x.copy_(functional.rms_norm(residual, (x.shape[-1],), w + bias if bias else w, EPS))

    return fused_add_rmsnorm


def _eager_layer(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x.float(), (x.shape[-1],), gamma, beta, EPS).to(x.dtype)


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def plain(rows: int, hidden: int) -> tuple[torch.Tensor, ...]:
        x = _randn(rows, hidden, dtype=dtype)
        return x, _randn(hidden, dtype=dtype), poison(torch.empty_like(x))

    def fused(rows: int, hidden: int) -> tuple[torch.Tensor, ...]:
        x, residual = (_randn(rows, hidden, dtype=dtype) for _ in range(2))
        return x, residual, _randn(hidden, dtype=dtype)

    def layer(rows: int, hidden: int) -> tuple[torch.Tensor, ...]:
        gamma, beta = (_randn(hidden, dtype=torch.float32) for _ in range(2))
        return _randn(rows, hidden, dtype=dtype), gamma, beta

    def heads(tokens: int) -> tuple[torch.Tensor, ...]:
        x = packed_slice(tokens, HEADS, 0, HEAD_DIM, dtype=dtype)
        out = poison(torch.empty(x.shape, dtype=dtype, device="cuda"))
        return x, _randn(HEAD_DIM, dtype=dtype), out

    kinds: list[tuple[str, list[tuple[int, int]], int, Function, Function, Function]] = [
        # op, shapes, tensors moved, arguments, our call, plain PyTorch
        ("rmsnorm", RMSNORM, 2, plain, _norm, _eager_norm(0.0)),
        ("gemma_rmsnorm", GEMMA, 2, plain, _norm, _eager_norm(1.0)),
        ("fused_add_rmsnorm", FUSED_ADD, 4, fused, _fused, _eager_fused(0.0)),
        ("gemma_fused_add_rmsnorm", GEMMA, 4, fused, _fused, _eager_fused(1.0)),
    ]
    if dtype == torch.bfloat16:
        kinds.append(("layernorm", LAYERNORM, 2, layer, _layer, _eager_layer))
    for op, shapes, tensors, make, bind, eager in kinds:
        for rows, hidden in shapes:
            yield Case(
                op,
                f"[{rows}, {hidden}]",
                tensors * rows * hidden * dtype.itemsize,
                lambda make=make, rows=rows, hidden=hidden: make(rows, hidden),
                bind,
                eager,
            )
    for tokens in QK_TOKENS:
        yield Case(
            "rmsnorm",
            f"[{tokens}, {HEADS[0]}, {HEAD_DIM}] of packed qkv",
            2 * tokens * HEADS[0] * HEAD_DIM * dtype.itemsize,
            lambda tokens=tokens: heads(tokens),
            _norm,
            _eager_norm(0.0),
        )


if __name__ == "__main__":
    script(__file__)
