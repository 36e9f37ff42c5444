# SPDX-License-Identifier: Apache-2.0
"""What the norms with an activation behind them must compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases_norm import _rms, _weight
from op_case import EPS, HALVES, OpCase, Tensors

from precast.testing import random_tensor


def _silu(x: torch.Tensor, weight: torch.Tensor, *, eps: float = EPS) -> Tensors:
    return (torch.nn.functional.silu(_rms(0.0)(x, weight, eps=eps)[0]),)


def _gate_and_weight(x: torch.Tensor, generator: torch.Generator) -> Tensors:
    gate = random_tensor(*x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return (gate, *_weight(x, generator))


def _gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5
) -> Tensors:
    return (_rms(0.0)(x, weight, eps=eps)[0] * torch.sigmoid(gate.double()),)


def _call_gated(
    function: Callable[..., Any], args: Tensors, out: torch.Tensor | None, **keywords: Any
) -> Tensors:
    x, gate, weight = args
    if out is None:
        out = torch.empty_like(x)
    assert function(x, gate, weight=weight, out=out, **keywords) is None
    return (out,)


CASES = (
    OpCase("fused_rmsnorm_silu", "norm_gate", HALVES, _weight, _silu, out_axis=True),
    OpCase(
        "rmsnorm_sigmoid_gate",
        "norm_gate",
        HALVES,
        _gate_and_weight,
        _gated,
        call=_call_gated,
        out_axis=True,
    ),
)
