# SPDX-License-Identifier: Apache-2.0
"""What the norms with fp8 output share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.validation import check_one_number
from precast._ops.norm._trace import axes_of, heads_axes, rows_axes
from precast.trace import Scalar, Tensor, TraceTemplate, dispatch

FP8 = ("float8_e4m3fn", "float8_e5m2")


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
    name: str,
    description: str,
    reference: Callable[..., Any],
    *,
    rows: Mapping[str, str],
    written: Mapping[str, str] | None = None,
    vectors: Sequence[str] = ("weight",),
    vector_dtype: str | None = None,
    op_type: str = "rmsnorm",
) -> Callable[..., TraceTemplate]:
    """Templates of a norm that is quantised by a given scale, by rank and type of ``out``.

    ``rows`` and ``written`` give the parameter of each tensor of rows that is read and of each that
    is written besides ``out``.
    """

    def template(rank: int, dtype: str) -> TraceTemplate:
        axes = heads_axes() if rank == 3 else rows_axes()
        suffix = ("_heads" if rank == 3 else "") + ("_e5m2" if dtype == FP8[1] else "")
        return TraceTemplate(
            op_type=op_type,
            name_prefix=name + suffix,
            description=description,
            axes=axes,
            inputs={
                "out": Tensor([*axes], dtype=dtype, description="Says the type of the output."),
                **{row: Tensor([*axes], param=param) for row, param in rows.items()},
                **{vector: Tensor([*axes][-1:], dtype=vector_dtype) for vector in vectors},
                "scale": Scalar("float32", description="What a consumer multiplies by."),
                "eps": Scalar("float32"),
            },
            outputs={
                "output": Tensor([*axes], dtype_from="out", param="out"),
                **{
                    row: Tensor([*axes], dtype_from="hidden_states", param=param)
                    for row, param in (written or {}).items()
                },
            },
            reference=reference,
        )

    templates = {(rank, dtype): template(rank, dtype) for rank in (2, 3) for dtype in FP8}

    @dispatch(*templates.values())
    def by_rank_and_type(input: Any, out: Any, **others: Any) -> TraceTemplate:
        e5m2 = str(getattr(out, "dtype", "")).endswith(FP8[1])
        return templates[3 if axes_of(input) == 3 else 2, FP8[e5m2]]

    return by_rank_and_type
