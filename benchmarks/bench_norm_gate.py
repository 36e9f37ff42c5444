# SPDX-License-Identifier: Apache-2.0
"""RMSNorm followed by SiLU, and multiplied by a sigmoid gate.

With 16-bit rows the norm with SiLU moves 4 bytes an element and its parts move 8, so by bytes it
takes 0.5 of their time. With a gate it moves 6, and a norm followed by a product with the sigmoid
moves 10: 0.6 of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _script import script
from torch.nn import functional

from precast.testing import poison

EPS = 1e-6
# Tokens and channels of Wan's VAE; then rows of a language model.
SILU = [(6240, 160), (99840, 320), (24960, 640), (399360, 128), (16384, 4096)]
# Tokens and heads: 64, which FlashInfer has a kernel for, and Kimi Linear's 128.
GATE = [(64, 32, 128), (1024, 32, 128), (16384, 32, 128), (16384, 64, 64)]

Function = Callable[..., Any]


def _eager_silu(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    y = functional.silu(functional.rms_norm(x.float(), (x.shape[-1],), w.float(), EPS))
    return out.copy_(y)


def _eager_gate(x: torch.Tensor, gate: torch.Tensor) -> None:
    y = functional.rms_norm(x.float(), (x.shape[-1],), None, EPS)
    x.copy_(y * torch.sigmoid(gate.float()))


def _bind_silu(fn: Function) -> Function:
    return lambda x, w, out: fn(x, w, EPS, out)


def _bind_gate(fn: Function) -> Function:
    return lambda x, gate: fn(x, gate, EPS)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    def silu(*shape: int) -> tuple[torch.Tensor, ...]:
        x = randn(*shape)
        return x, randn(shape[-1]), poison(torch.empty_like(x))

    def gate(*shape: int) -> tuple[torch.Tensor, ...]:
        return randn(*shape), randn(*shape)

    kinds: list[tuple[str, list[Any], int, Function, Function, Function]] = [
        # op, shapes, tensors moved, arguments, our call, plain PyTorch
        ("fused_rmsnorm_silu", SILU, 2, silu, _bind_silu, _eager_silu),
        ("rmsnorm_sigmoid_gate", GATE, 3, gate, _bind_gate, _eager_gate),
    ]
    for op, shapes, tensors, make, bind, eager in kinds:
        for shape in shapes:
            yield Case(
                op,
                str([*shape]),
                tensors * torch.Size(shape).numel() * dtype.itemsize,
                lambda make=make, shape=shape: make(*shape),
                bind,
                eager,
            )


if __name__ == "__main__":
    script(__file__)
