# SPDX-License-Identifier: Apache-2.0
"""What the functions of norm must compute."""

from __future__ import annotations

import torch
from op_case import EPS, HALVES, Expected, OpCase, Tensors

from precast.testing import random_tensor


def _weight(x: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor]:
    return (random_tensor(x.shape[-1], dtype=x.dtype, device=x.device, generator=generator),)


def _residual_and_weight(x: torch.Tensor, generator: torch.Generator) -> Tensors:
    residual = random_tensor(*x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return (residual, *_weight(x, generator))


def _gamma_and_beta(x: torch.Tensor, generator: torch.Generator) -> Tensors:
    def vector() -> torch.Tensor:
        return random_tensor(x.shape[-1], dtype=torch.float32, device=x.device, generator=generator)

    return vector(), vector()


def _rms(bias: float) -> Expected:
    def formula(x: torch.Tensor, weight: torch.Tensor, *, eps: float = EPS) -> Tensors:
        wide = x.double()
        rms = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
        return (wide / rms * (weight.double() + bias),)

    return formula


def _fused_add_rms(bias: float) -> Expected:
    def formula(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = EPS
    ) -> Tensors:
        total = x.double() + residual.double()
        return (*_rms(bias)(total, weight, eps=eps), total)

    return formula


def _layer_norm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *, eps: float = EPS
) -> Tensors:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return (centred / deviation * gamma.double() + beta.double(),)


CASES = (
    OpCase("rmsnorm", "norm", HALVES, _weight, _rms(0.0)),
    OpCase("gemma_rmsnorm", "norm", HALVES, _weight, _rms(1.0)),
    OpCase("fused_add_rmsnorm", "norm", HALVES, _residual_and_weight, _fused_add_rms(0.0), True),
    OpCase(
        "gemma_fused_add_rmsnorm",
        "norm",
        HALVES,
        _residual_and_weight,
        _fused_add_rms(1.0),
        True,
    ),
    OpCase("layernorm", "norm", HALVES, _gamma_and_beta, _layer_norm, contiguous=True),
)
