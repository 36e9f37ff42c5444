# SPDX-License-Identifier: Apache-2.0
"""The traces of block-scaled tensors: matrices, their scales with the padding of the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

ROWS = Var("Rows: tokens of all requests.")


def scale_axes(columns: str, layout: str | None) -> dict[str, Var | Const]:
    """Rows and columns of the scales of ``columns`` blocks; tiles of 128x4 without ``layout``."""
    rows = "(num_tokens + 127) // 128 * 128"
    padded = f"({columns} + 3) // 4 * 4"
    if layout is not None:
        rows = (
            f"({rows} if {layout} == 0 else (num_tokens + 7) // 8 * 8 if {layout} == 1 else "
            f"num_tokens)"
        )
        padded = f"({padded} if {layout} != 2 else {columns})"
    return {
        "scale_rows": Const(abbrev="sr", value=rows),
        "scale_columns": Const(abbrev="", value=padded),
    }


def quantize_trace(
    name: str,
    description: str,
    reference: Callable[..., Any],
    *,
    input: str,
    block: int,
    global_scale: str | None = None,
    layout: str | None = None,
    elements: str = "uint8",
) -> TraceTemplate:
    """Of ``[num_tokens, hidden_size]``; the other names are those of the op's parameters."""
    packed = elements == "uint8"
    inputs: dict[str, Tensor | Scalar] = {
        "hidden_states": Tensor(["num_tokens", "hidden_size"], param=input)
    }
    axes: dict[str, Var | Const] = {"hidden_size": Const("h"), "num_tokens": ROWS}
    if global_scale is not None:
        axes["one"] = Const(abbrev="", value="1")
        inputs["global_scale"] = Tensor(["one"], param=global_scale, dtype="float32")
    if layout is not None:
        inputs["scale_layout"] = Scalar("int32", param=layout)
    if packed:
        axes["packed_size"] = Const(abbrev="", value="hidden_size // 2")
    axes |= scale_axes(f"hidden_size // {block}", "scale_layout" if layout else None)
    return TraceTemplate(
        op_type="quantization",
        name_prefix=name,
        description=description,
        axes=axes,
        inputs=inputs,
        outputs={
            "quantized": Tensor(
                ["num_tokens", "packed_size" if packed else "hidden_size"], dtype=elements
            ),
            "scales": Tensor(["scale_rows", "scale_columns"], dtype="uint8"),
        },
        reference=reference,
    )


def dequantize_trace(
    name: str,
    description: str,
    reference: Callable[..., Any],
    *,
    input: str,
    scales: str,
    block: int,
    global_scale: str | None = None,
    layout: str | None = None,
    linear: bool = False,
    elements: str = "uint8",
    output: str = "float32",
    extra: Mapping[str, Scalar] | None = None,
) -> TraceTemplate:
    """To ``[num_tokens, hidden_size]``; the other names are those of the op's parameters."""
    packed = elements == "uint8"
    axes: dict[str, Var | Const] = {"packed_size": Const(abbrev="")} if packed else {}
    axes["hidden_size"] = Const("h", value="packed_size * 2" if packed else None)
    axes["num_tokens"] = ROWS
    columns = f"hidden_size // {block}"
    if linear:
        axes["scale_columns"] = Const(abbrev="", value=columns)
    else:
        axes |= scale_axes(columns, "scale_layout" if layout else None)
    rows = "num_tokens" if linear else "scale_rows"
    inputs: dict[str, Tensor | Scalar] = {
        "quantized": Tensor(
            ["num_tokens", "packed_size" if packed else "hidden_size"], input, dtype=elements
        ),
        "scales": Tensor([rows, "scale_columns"], scales, dtype="uint8"),
    }
    if global_scale is not None:
        axes["one"] = Const(abbrev="", value="1")
        inputs["global_scale"] = Tensor(["one"], param=global_scale, dtype="float32")
    if layout is not None:
        inputs["scale_layout"] = Scalar("int32", param=layout)
    inputs |= extra or {}
    return TraceTemplate(
        op_type="quantization",
        name_prefix=name,
        description=description,
        axes=axes,
        inputs=inputs,
        outputs={"output": Tensor(["num_tokens", "hidden_size"], dtype=output)},
        reference=reference,
    )
