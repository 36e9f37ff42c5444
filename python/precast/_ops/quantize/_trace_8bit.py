# SPDX-License-Identifier: Apache-2.0
"""The trace templates of 8-bit quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_MULTIPLIER = "Multiplies the quantised values."


def of_e4m3(
    usual: TraceTemplate, packed: TraceTemplate | None = None
) -> Callable[..., TraceTemplate]:
    """A dispatch function: ``packed`` where scales are words of exponents, otherwise ``usual``.

    A definition holds one reference, which writes e4m3 because a definition cannot pass it a dtype:
    calls with another dtype have no definition.
    """
    templates = (usual,) if packed is None else (usual, packed)

    @dispatch(*templates)
    def choose(
        dst_dtype: Any = None,
        out: Any = None,
        out_scale: Any = None,
        use_packed_ue8m0: bool = False,
        **others: Any,
    ) -> TraceTemplate:
        dtype = dst_dtype if out is None else out.dtype
        if dtype not in (None, torch.float8_e4m3fn):
            raise ValueError(f"{usual!r}: only calls with float8_e4m3fn have a definition")
        words = getattr(out_scale, "dtype", None) == torch.int32
        return packed if packed is not None and (use_packed_ue8m0 or words) else usual

    return choose


def tensor_trace(
    name: str, description: str, reference: Callable[..., Any], *, given_scale: bool
) -> Callable[..., TraceTemplate]:
    """Make the template of a quantisation with one scale for a tensor of any shape."""
    scale = Tensor(["one"], dtype="float32", description=_MULTIPLIER)
    outputs = {"x_q": Tensor(["*size"], "out", "float8_e4m3fn")}
    if not given_scale:
        outputs["x_s"] = Tensor(["one"], "out_scale", "float32")
    template = TraceTemplate(
        op_type="quantization",
        name_prefix=name,
        description=description,
        axes={
            "*size": Var(),
            "one": Const("", sample=1) if given_scale else Const("", value="1"),
        },
        inputs={
            "x": Tensor(["*size"]),
            **({"scale": scale} if given_scale else {"eps": Scalar("float32")}),
        },
        outputs=outputs,
        reference=reference,
    )
    return of_e4m3(template)


def rows_trace(
    name: str,
    description: str,
    reference: Callable[..., Any],
    *,
    scales: str,
    gated: bool = False,
) -> Callable[..., TraceTemplate]:
    """Make the templates of a quantisation of rows.

    ``scales`` is ``given``, or ``token`` or ``group`` for one scale for each of them.
    """
    names = (name, description, reference)
    if scales == "group":
        return of_e4m3(
            _rows_template(*names, "group", gated), _rows_template(*names, "packed", gated)
        )
    return of_e4m3(_rows_template(*names, scales, gated))


def _rows_template(
    name: str, description: str, reference: Callable[..., Any], scales: str, gated: bool
) -> TraceTemplate:
    by_group, packed = scales in ("group", "packed"), scales == "packed"
    columns = "gate_up_size" if gated else "hidden_size"
    axes: dict[str, Var | Const] = {
        "*num_tokens": Var(),
        columns: Const(abbrev="" if gated else "h", sample=512 if by_group else None),
    }
    if by_group:
        axes["group_size"] = Const(abbrev="g", sample=128)
    if gated:
        axes["hidden_size"] = Const(abbrev="h", value="gate_up_size // 2")
    rows = Tensor(["*num_tokens", columns], param="input" if gated else "x")
    inputs: dict[str, Tensor | Scalar] = {"gate_up" if scales == "given" else "x": rows}
    outputs = {"x_q": Tensor(["*num_tokens", "hidden_size"], "out", "float8_e4m3fn")}
    if scales == "given":
        axes["one"] = Const(abbrev="", sample=1)
        inputs["scale"] = Tensor(["one"], dtype="float32", description=_MULTIPLIER)
    elif scales == "token":
        axes["one"] = Const(abbrev="", value="1")
        inputs["eps"] = Scalar("float32")
        outputs["x_s"] = Tensor(["*num_tokens", "one"], "out_scale", "float32")
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
        name_prefix=name + ("_packed" if packed else ""),
        description=description,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=reference,
        constraints=("hidden_size % group_size == 0",) if by_group else (),
    )
