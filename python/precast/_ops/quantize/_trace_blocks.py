# SPDX-License-Identifier: Apache-2.0
"""The traces of block-scaled tensors: matrices, their scales with the padding of the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from precast._op.declaration import Parameter
from precast._op.export import Export
from precast.trace import Const, Dtype, Scalar, Tensor, TraceTemplate, Var, dispatch

ROWS = Var("Rows: tokens of all requests.")


class Layout(NamedTuple):
    """How the arguments of a call say in which layout its scales are.

    ``linear`` and ``small`` are conditions in terms of ``inputs``; where neither holds, the layout
    is tiles of 128x4.
    """

    linear: str
    small: str  # tiles of 8x4
    inputs: Mapping[str, Scalar]

    @classmethod
    def of_number(cls, param: str) -> Layout:
        """One argument says it, an ``SfLayout``."""
        numbers = {"scale_layout": Scalar("int32", param=param, sample=0)}
        return cls("scale_layout == 2", "scale_layout == 1", numbers)

    @classmethod
    def of_export(cls, export: Export) -> Layout:
        """Take a declared ``sfLayout``, the two flags of older functions, or linear."""
        if "sfLayout" in export.declaration.names:
            return cls.of_number("sfLayout")
        if "sf_layout" in export.declaration.names:
            flags = ("is_sf_swizzled_layout", "is_sf_8x4_layout")
            return cls(f"not {flags[0]}", flags[1], {flag: Scalar("bool") for flag in flags})
        return cls("True", "False", {})

    def shape(self, columns: str) -> tuple[str, str]:
        """Return the rows and columns of the scales, where a row has ``columns`` blocks."""
        if not self.inputs:
            return "num_tokens", columns
        rows = (
            f"(num_tokens if {self.linear} else (num_tokens + 7) // 8 * 8 if {self.small} else "
            f"(num_tokens + 127) // 128 * 128)"
        )
        return rows, f"({columns} if {self.linear} else ({columns} + 3) // 4 * 4)"


def _tensors_read(export: Export) -> list[Parameter]:
    """Return the values, block scales in a dequantisation, and the global scale if there is one."""
    return [tensor for tensor in export.declaration.tensors if not tensor.written]


def quantize_trace(
    export: Export,
    description: str,
    reference: Callable[..., Any],
    block: int,
    *,
    suffix: str = "",
    global_scale: bool = True,
    extra: Mapping[str, Scalar] | None = None,
    fixed: Mapping[str, object] | None = None,
) -> TraceTemplate:
    """Make the template of a quantisation of ``[..., hidden_size]`` to e2m1."""
    source, *scales = _tensors_read(export)
    inputs: dict[str, Tensor | Scalar] = {
        "hidden_states": Tensor(["*num_tokens", "hidden_size"], param=source.name)
    }
    axes: dict[str, Var | Const] = {"hidden_size": Const("h"), "*num_tokens": ROWS}
    if scales and global_scale:
        axes["num_global_scales"] = Var("1, or one a row.", sample=1)
        inputs["global_scale"] = Tensor(["num_global_scales"], scales[0].name, dtype="float32")
    layout = Layout.of_export(export)
    rows, columns = layout.shape(f"(hidden_size // {block})")
    axes["packed_size"] = Const(abbrev="", value="hidden_size // 2")
    axes["scale_rows"] = Const(abbrev="sr", value=rows)
    axes["scale_columns"] = Const(abbrev="sc", value=columns)
    return TraceTemplate(
        op_type="quantization",
        name_prefix=export.function + suffix,
        description=description,
        axes=axes,
        inputs={**inputs, **layout.inputs, **(extra or {})},
        outputs={
            "quantized": Tensor(["*num_tokens", "packed_size"], dtype="uint8"),
            "scales": Tensor(["scale_rows", "scale_columns"], dtype="uint8"),
        },
        reference=reference,
        fixed=fixed,
    )


def dequantize_trace(
    export: Export,
    description: str,
    reference: Callable[..., Any],
    block: int | str,
    *,
    suffix: str = "",
    global_scale: bool = True,
    output: str = "float32",
    extra: Mapping[str, Scalar] | None = None,
    fixed: Mapping[str, object] | None = None,
) -> TraceTemplate:
    """Make the template of a dequantisation to ``[..., hidden_size]``.

    ``block`` is a number or the name of one of ``extra``.
    """
    values, scales, *others = _tensors_read(export)
    packed = "packed" in values.kind.dims  # type: ignore[union-attr, operator]
    axes: dict[str, Var | Const] = {"packed_size": Const(abbrev="")} if packed else {}
    axes["hidden_size"] = Const("h", value="packed_size * 2" if packed else None)
    axes["*num_tokens"] = ROWS
    layout = Layout.of_export(export)
    rows, columns = layout.shape(f"(hidden_size // {block})")
    count = f"{rows} * {columns}"
    axes["*num_scales"] = Var("Scales with their padding, in any shape.", value=count)
    inputs: dict[str, Tensor | Scalar] = {
        "quantized": Tensor(["*num_tokens", "packed_size"], values.name, "uint8")
        if packed
        else Tensor(["*num_tokens", "hidden_size"], values.name, "float8_e4m3fn"),
        "scales": Tensor(["*num_scales"], scales.name, dtype="uint8"),
    }
    if others and global_scale:
        axes["*one"] = Var("One number, in any shape.", sample=1)
        inputs["global_scale"] = Tensor(["*one"], param=others[0].name, dtype="float32")
    return TraceTemplate(
        op_type="quantization",
        name_prefix=export.function + suffix,
        description=description,
        axes=axes,
        inputs={**inputs, **layout.inputs, **(extra or {})},
        outputs={"output": Tensor(["*num_tokens", "hidden_size"], dtype=output)},
        reference=reference,
        fixed=fixed,
        constraints=(f"num_scales == {count}",),
    )


def dequantize_trace_by_dtype(
    export: Export,
    description: str,
    reference: Callable[..., Any],
    block: int,
    usual: str,
    *others: str,
) -> Callable[..., TraceTemplate]:
    """Make a dispatch function on ``output_dtype``, which is ``usual`` by default."""
    of = (export, description, reference, block)
    made = {usual: dequantize_trace(*of, output=usual)}
    for word in others:
        fixed = {"output_dtype": Dtype(word)}
        made[word] = dequantize_trace(*of, suffix=f"_to_{word}", output=word, fixed=fixed)

    @dispatch(*made.values())
    def choose(output_dtype: Any = None, **arguments: Any) -> TraceTemplate:
        return made[usual if output_dtype is None else str(output_dtype).removeprefix("torch.")]

    return choose
