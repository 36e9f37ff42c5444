# SPDX-License-Identifier: Apache-2.0
"""The trace templates of 8-bit quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._op.export import Export
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_MULTIPLIER = "Multiplies the quantised values."


def of_e4m3(
    usual: TraceTemplate, packed: TraceTemplate | None = None
) -> Callable[..., TraceTemplate]:
    """Make a dispatch function: ``packed`` where scales are words of exponents, or ``usual``.

    A definition holds one reference, which writes e4m3 because a definition cannot pass it a dtype:
    calls with another dtype have no definition.
    """
    templates = (usual,) if packed is None else (usual, packed)

    @dispatch(*templates)
    def choose(dst_dtype: Any = None, out: Any = None, **call: Any) -> TraceTemplate:
        dtype = dst_dtype if out is None else out.dtype
        if dtype not in (None, torch.float8_e4m3fn):
            raise ValueError(f"{usual!r}: only calls with float8_e4m3fn have a definition")
        words = getattr(call.get("out_scale"), "dtype", None) == torch.int32
        return packed if packed and (words or call.get("use_packed_ue8m0")) else usual

    return choose


def quant_trace(export: Export, description: str) -> Callable[..., TraceTemplate]:
    """Make the templates of a quantisation of a tensor, or of rows.

    Rows are those of ``x``, or products of the halves of ``input``. There is a given ``scale``, or
    one for each tensor, row or group of ``group_size``.
    """
    forms = (False, True) if "group_size" in export.declaration.names else (False,)
    return of_e4m3(*(_template(export, description, packed) for packed in forms))


def _template(export: Export, description: str, packed: bool) -> TraceTemplate:
    names = export.declaration.names
    gated, given, by_group = "input" in names, "scale" in names, "group_size" in names
    columns = "gate_up_size" if gated else "hidden_size"
    axes: dict[str, Var | Const] = {
        "*num_tokens": Var(),
        columns: Const(abbrev="" if gated else "h", sample=512 if by_group else None),
    }
    source, shape = ["*num_tokens", columns], ["*num_tokens", "hidden_size"]
    scales = ["*num_tokens", "one"]
    if by_group:
        axes["group_size"] = Const(abbrev="g", sample=128)
    if gated:
        axes["hidden_size"] = Const(abbrev="h", value="gate_up_size // 2")
    elif given or "workspace" in names:  # Of the whole tensor, in any shape.
        axes, source, shape, scales = {"*size": Var()}, ["*size"], ["*size"], ["one"]
    inputs: dict[str, Tensor | Scalar] = {
        "gate_up" if gated and given else "x": Tensor(source, param="input" if gated else "x")
    }
    outputs = {"x_q": Tensor(shape, "out", "float8_e4m3fn")}
    if given:
        axes["one"] = Const(abbrev="", sample=1)
        inputs["scale"] = Tensor(["one"], dtype="float32", description=_MULTIPLIER)
    elif not by_group:
        axes["one"] = Const(abbrev="", value="1")
        inputs["eps"] = Scalar("float32")
        outputs["x_s"] = Tensor(scales, "out_scale", "float32")
    else:
        groups = "hidden_size // group_size"
        axes["num_scales"] = Const(abbrev="", value=f"({groups} + 3) // 4" if packed else groups)
        inputs["group_size"] = Scalar("int32")
        inputs["eps"] = Scalar("float32")
        inputs["scale_ue8m0"] = Scalar("bool", sample=packed)
        if packed:
            inputs["use_packed_ue8m0"] = Scalar("bool", sample=True)
        outputs["x_s"] = Tensor(
            ["*num_tokens", "num_scales"],
            "out_scale",
            "int32" if packed else "float32",
            description="Biased exponents, four a word." if packed else _MULTIPLIER,
        )
    return TraceTemplate(
        op_type="quantization",
        name_prefix=export.function + ("_packed" if packed else ""),
        description=description,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=export.out_of_place,
        constraints=("hidden_size % group_size == 0",) if by_group else (),
    )
