# SPDX-License-Identifier: Apache-2.0
"""The same call by other libraries: one small adapter each, used where it is installed.

Every adapter takes the positional arguments of our benchmark of that op, outputs included.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Function = Callable[..., Any]
EPS = 1e-6


def _rms_norm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), w, EPS)


def _gemma_rms_norm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), w + 1, EPS)


def _fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> None:
    residual.add_(x)
    x.copy_(functional.rms_norm(residual, (x.shape[-1],), w, EPS))


def _gemma_fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> None:
    _fused_add_rms_norm(x, residual, w + 1)


def _layer_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x.float(), (x.shape[-1],), gamma, beta, EPS).to(x.dtype)


def _gated(activation: Function) -> Function:
    def call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.mul(activation(gate), up)

    return call


#: Plain PyTorch, and what torch.compile gets.
TORCH: dict[str, Function] = {
    "scale": lambda x, factor, out: torch.mul(x, factor),
    "rmsnorm": _rms_norm,
    "gemma_rmsnorm": _gemma_rms_norm,
    "fused_add_rmsnorm": _fused_add_rms_norm,
    "gemma_fused_add_rmsnorm": _gemma_fused_add_rms_norm,
    "layernorm": _layer_norm,
    "silu_and_mul": _gated(functional.silu),
    "gelu_and_mul": _gated(functional.gelu),
    "gelu_tanh_and_mul": _gated(lambda x: functional.gelu(x, approximate="tanh")),
}


def flashinfer(op: str) -> Function | None:
    """FlashInfer's function of the same name, or None."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer as library
    import flashinfer.norm

    fn = getattr(library, op, None) or getattr(flashinfer.norm, op, None)
    if fn is None:
        return None
    if op in ("rmsnorm", "gemma_rmsnorm"):
        return lambda x, w, out: fn(x, w, EPS, out=out)
    if op in ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "layernorm"):
        return lambda *args: fn(*args, EPS)
    return lambda x, out: fn(x, out=out)


def torch_compile(op: str) -> Function:
    """Inductor's kernel for exactly the shape of the first call."""
    torch._dynamo.reset()
    return torch.compile(TORCH[op], dynamic=False, fullgraph=True)


def peers(op: str, wanted: list[str]) -> dict[str, Function]:
    """The peers of one op by name, in the order of ``NAMES``."""
    found: dict[str, Function] = {}
    if "flashinfer" in wanted and (fn := flashinfer(op)) is not None:
        found["flashinfer"] = fn
    if "torch" in wanted and op in TORCH:
        found["torch"] = TORCH[op]
    if "compile" in wanted and op in TORCH:
        found["compile"] = torch_compile(op)
    return found


NAMES = ("flashinfer", "torch", "compile")
