# SPDX-License-Identifier: Apache-2.0
"""What the norms with fp8 output must compute; ``input`` comes first in the arguments here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases_norm import _fused_add_rms, _gamma_and_beta, _layer_norm, _residual_and_weight, _rms
from cases_norm import _weight as _weight
from op_case import EPS, FP8, HALVES, OpCase, Tensors

E4M3 = FP8["e4m3"]
GROUP = 128


def _scale(x: torch.Tensor) -> torch.Tensor:
    return torch.full((1,), 0.03, device=x.device)


def _weight_and_scale(x: torch.Tensor, generator: torch.Generator) -> Tensors:
    return (*_weight(x, generator), _scale(x))


def _residual_weight_and_scale(x: torch.Tensor, generator: torch.Generator) -> Tensors:
    return (*_residual_and_weight(x, generator), _scale(x))


def _gamma_beta_and_scale(x: torch.Tensor, generator: torch.Generator) -> Tensors:
    return (*_gamma_and_beta(x, generator), _scale(x))


def _over_scale(formula: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """The first output over the last argument, limited to e4m3."""

    def expected(*args: Any, eps: float = EPS) -> Tensors:
        *args_of_norm, scale = args
        first, *others = formula(*args_of_norm, eps=eps)
        return ((first / scale.double()).clamp(-448.0, 448.0), *others)

    return expected


def _out_first(
    function: Callable[..., Any], args: Tensors, out: torch.Tensor | None, **keywords: Any
) -> Tensors:
    if out is None:
        out = torch.empty(args[0].shape, dtype=E4M3, device=args[0].device)
    assert function(out, *args, **keywords) is None
    return (out,)


def _out_first_and_residual(
    function: Callable[..., Any], args: Tensors, out: torch.Tensor | None, **keywords: Any
) -> Tensors:
    return (*_out_first(function, args, out, **keywords), args[1])


def _residual_weight_and_outputs(x: torch.Tensor, generator: torch.Generator) -> Tensors:
    rows, groups = x.shape[:-1].numel(), x.shape[-1] // GROUP
    scales = torch.full((groups, -(-rows // 4) * 4), -1.0, device=x.device)
    normed = torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
    return (*_residual_and_weight(x, generator), scales, normed)


def _blocks(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    normed: torch.Tensor,
    *,
    eps: float = EPS,
) -> Tensors:
    y, total = _fused_add_rms(0.0)(x, residual, weight, eps=eps)
    groups = y.unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    return (groups / amax * 448.0).flatten(-2), total, y


def _call_blocks(
    function: Callable[..., Any], args: Tensors, out: torch.Tensor | None, **keywords: Any
) -> Tensors:
    x, residual, weight, scales, normed = args
    if out is None:
        out = torch.empty(x.shape, dtype=E4M3, device=x.device)
    assert function(out, scales, normed, x, residual, weight, **keywords) is None
    return out, residual, normed


def _quant(name: str, extras: Any, formula: Any, call: Any, **more: Any) -> OpCase:
    expected = _over_scale(formula)
    return OpCase(
        name,
        "norm_quant",
        HALVES,
        extras,
        expected,
        call=call,
        out_word="e4m3",
        out_axis=True,
        **more,
    )


CASES = (
    _quant("rmsnorm_quant", _weight_and_scale, _rms(0.0), _out_first),
    _quant(
        "fused_add_rmsnorm_quant",
        _residual_weight_and_scale,
        _fused_add_rms(0.0),
        _out_first_and_residual,
        written=(1,),
    ),
    _quant("layernorm_quant", _gamma_beta_and_scale, _layer_norm, _out_first, contiguous=True),
    OpCase(
        "fused_add_rmsnorm_fp8_block_quant",
        "norm_block_quant",
        HALVES,
        _residual_weight_and_outputs,
        _blocks,
        vector=GROUP,
        call=_call_blocks,
        written=(1, 3, 4),
        out_word="e4m3",
    ),
)
