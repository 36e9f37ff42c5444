# SPDX-License-Identifier: Apache-2.0
"""The traces of block-scaled tensors: matrices, their scales with the padding of the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast._op.export import Export
from precast.trace import Const, Dtype, Scalar, Tensor, TraceTemplate, Var, dispatch

ROWS = Var("Rows: tokens of all requests.")


#: The flags of older functions.
_FLAGS = ("is_sf_swizzled_layout", "is_sf_8x4_layout")


def layout_of(columns: str, *params: str) -> tuple[dict[str, Scalar], str, str]:
    """Return the inputs that say the layout, and the rows and columns of the scales with padding.

    A row has ``columns`` blocks. ``params`` are flags, or an ``SfLayout``; without any, scales are
    linear.
    """
    if not params:
        return {}, "num_tokens", columns
    if params[0] in _FLAGS:
        linear, small = f"not {params[0]}", params[1] if params[1:] else "False"
        inputs = {flag: Scalar("bool") for flag in params}
    else:
        linear, small = "scale_layout == 2", "scale_layout == 1"
        inputs = {"scale_layout": Scalar("int32", param=params[0], sample=0)}
    rows = (
        f"(num_tokens if {linear} else (num_tokens + 7) // 8 * 8 if {small} else "
        f"(num_tokens + 127) // 128 * 128)"
    )
    return inputs, rows, f"({columns} if {linear} else ({columns} + 3) // 4 * 4)"


def _layout_of_export(export: Export, block: int | str) -> tuple[dict[str, Scalar], str, str]:
    names = export.declaration.names
    params = ("sfLayout",) if "sfLayout" in names else _FLAGS if "sf_layout" in names else ()
    return layout_of(f"(hidden_size // {block})", *params)


def quantize_trace(
    export: Export, description: str, block: int, ue8m0: Mapping[str, object] | None = None
) -> TraceTemplate:
    """Make the template of a quantisation of ``[..., hidden_size]`` to e2m1.

    ``ue8m0`` is how a call says that scales are powers of two, where it may.
    """
    source, *scales = (tensor for tensor in export.declaration.tensors if not tensor.written)
    inputs: dict[str, Tensor | Scalar] = {
        "hidden_states": Tensor(["*num_tokens", "hidden_size"], param=source.name)
    }
    axes: dict[str, Var | Const] = {"hidden_size": Const("h"), "*num_tokens": ROWS}
    layout, rows, columns = _layout_of_export(export, block)
    if scales and not ue8m0:
        axes["num_global_scales"] = Var("1, or one a row.", sample=1)
        inputs["global_scale"] = Tensor(["num_global_scales"], scales[0].name, dtype="float32")
    inputs.update(layout)
    if "is_global_scale_inversed" in export.declaration.names and not ue8m0:
        inputs["is_global_scale_inversed"] = Scalar("bool")
    axes["packed_size"] = Const(abbrev="", value="hidden_size // 2")
    axes["scale_rows"] = Const(abbrev="sr", value=rows)
    axes["scale_columns"] = Const(abbrev="sc", value=columns)
    return TraceTemplate(
        op_type="quantization",
        name_prefix=export.function + ("_ue8m0" if ue8m0 else ""),
        description=description,
        axes=axes,
        inputs=inputs,
        outputs={
            "quantized": Tensor(["*num_tokens", "packed_size"], dtype="uint8"),
            "scales": Tensor(["scale_rows", "scale_columns"], dtype="uint8"),
        },
        reference=export.out_of_place,
        fixed=ue8m0,
    )


def dequantize_trace(
    export: Export,
    description: str,
    block: int | str,
    ue8m0: Mapping[str, object] | None = None,
    usual: str = "float32",
    other: str | None = None,
) -> TraceTemplate:
    """Make the template of a dequantisation to ``[..., hidden_size]``.

    ``block`` is a number or the name of one. The output is ``usual``, or what ``other`` asks for.
    """
    values, scales, *others = (t for t in export.declaration.tensors if not t.written)
    packed = "packed" in values.kind.dims  # type: ignore[union-attr, operator]
    axes: dict[str, Var | Const] = {"packed_size": Const(abbrev="")} if packed else {}
    axes["hidden_size"] = Const("h", value="packed_size * 2" if packed else None)
    axes["*num_tokens"] = ROWS
    layout, rows, columns = _layout_of_export(export, block)
    count = f"{rows} * {columns}"
    axes["*num_scales"] = Var("Scales with their padding, in any shape.", value=count)
    inputs: dict[str, Tensor | Scalar] = {
        "quantized": Tensor(["*num_tokens", "packed_size"], values.name, "uint8")
        if packed
        else Tensor(["*num_tokens", "hidden_size"], values.name, "float8_e4m3fn"),
        "scales": Tensor(["*num_scales"], scales.name, dtype="uint8"),
    }
    if others and not ue8m0:
        axes["*one"] = Var("One number, in any shape.", sample=1)
        inputs["global_scale"] = Tensor(["*one"], param=others[0].name, dtype="float32")
    inputs.update(layout)
    if isinstance(block, str):
        inputs[block] = Scalar("int32")
    suffix = "_ue8m0" if ue8m0 else f"_to_{other}" if other else ""
    return TraceTemplate(
        op_type="quantization",
        name_prefix=export.function + suffix,
        description=description,
        axes=axes,
        inputs=inputs,
        outputs={"output": Tensor(["*num_tokens", "hidden_size"], dtype=other or usual)},
        reference=export.out_of_place,
        fixed={"output_dtype": Dtype(other)} if other else ue8m0,
        constraints=(f"num_scales == {count}",),
    )


def dequantize_trace_by_dtype(
    export: Export, description: str, block: int, usual: str, *others: str
) -> Callable[..., TraceTemplate]:
    """Make a dispatch function on ``output_dtype``, which is ``usual`` by default."""
    made = {
        word or usual: dequantize_trace(export, description, block, usual=usual, other=word)
        for word in (None, *others)
    }

    @dispatch(*made.values())
    def choose(output_dtype: Any = None, **arguments: Any) -> TraceTemplate:
        return made[usual if output_dtype is None else str(output_dtype).removeprefix("torch.")]

    return choose
