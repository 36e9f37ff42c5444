# SPDX-License-Identifier: Apache-2.0
"""What the functions of activation must compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from op_case import HALVES, Expected, OpCase, Tensors


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Expected:
    def formula(x: torch.Tensor) -> Tensors:
        gate, up = x.double().chunk(2, dim=-1)
        return (activation(gate) * up,)

    return formula


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * torch.special.erfc(-x / 2**0.5)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


CASES = tuple(
    OpCase(
        f"{name}_and_mul",
        "activation",
        HALVES,
        lambda x, generator: (),
        _gated(activation),
        gated=True,
        vector=8,
        ranks=(1, 2, 3),
    )
    for name, activation in (("silu", _silu), ("gelu", _gelu), ("gelu_tanh", _gelu_tanh))
)
