# SPDX-License-Identifier: Apache-2.0
"""What the norms with fp8 output share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.export import Export
from precast._op.validation import check_one_number
from precast._ops.norm._trace import norm_trace
from precast.trace import TraceTemplate


def over_scale(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """``saturated(x * (1 / scale))`` in fp32."""
    number = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    return saturated(x * number.reciprocal(), dtype)


def scale_tensor(export: str, scale: float, input: torch.Tensor, frames: int) -> torch.Tensor:
    """A scale that was passed as a number, on the device of ``input`` without a wait for it."""
    if isinstance(scale, bool) or not isinstance(scale, (float, int)):
        raise TypeError(f"{export}: scale must be a torch.Tensor, got {type(scale).__name__}")
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"{export}: scale as a float is deprecated; pass a float32 tensor of shape (1,) on the "
            "device of input",
            FutureWarning,
            stacklevel=frames,
        )
    return torch.full((1,), scale, dtype=torch.float32, device=input.device)


def scale_kinds(export: str, frames: int = 3) -> dict[str, Kind]:
    """The kind ``scale``: one float32 number in a tensor; a Python number is deprecated.

    The warning names the caller's line, which is ``frames`` above: 3 for a plain op, 5 for one with
    a body.
    """
    source = (
        "{name} if isinstance({name}, _torch.Tensor) else "
        f"_scale_tensor({export!r}, {{name}}, input, {frames})"
    )
    return {"scale": Kind("Tensor {name}", source, names={"_scale_tensor": scale_tensor})}


def check_scale(export: str, scale: torch.Tensor, input: torch.Tensor) -> None:
    """Raise ValueError for a scale that is not one float32 number."""
    check_one_number(export, "scale", scale, input)


def quant_trace(
    export: Export, description: str, reference: Callable[..., Any], op_type: str = "rmsnorm"
) -> Callable[..., TraceTemplate]:
    """Templates of a norm that is quantised by a given scale, by rank and type of ``out``."""
    return norm_trace(
        export,
        description,
        reference,
        op_type=op_type,
        out_says="Says the type of the output.",
        variants={
            "": {"out_dtype": "float8_e4m3fn"},
            "_e5m2": {"out_dtype": "float8_e5m2"},
        },
        choose=lambda out, **others: (
            "_e5m2" if str(getattr(out, "dtype", "")).endswith("float8_e5m2") else ""
        ),
    )
