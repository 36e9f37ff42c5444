# SPDX-License-Identifier: Apache-2.0
"""The traces of block-scaled tensors: matrices, their scales with the padding of the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
    def of_flags(cls) -> Layout:
        """The two flags of FlashInfer's older functions say it."""
        flags = ("is_sf_swizzled_layout", "is_sf_8x4_layout")
        return cls(f"not {flags[0]}", flags[1], {flag: Scalar("bool") for flag in flags})

    def shape(self, columns: str) -> tuple[str, str]:
        """Return the rows and columns of the scales, where a row has ``columns`` blocks."""
        if not self.inputs:
            return "num_tokens", columns
        rows = (
            f"(num_tokens if {self.linear} else (num_tokens + 7) // 8 * 8 if {self.small} else "
            f"(num_tokens + 127) // 128 * 128)"
        )
        return rows, f"({columns} if {self.linear} else ({columns} + 3) // 4 * 4)"


#: The layout is linear, whatever the arguments are.
LINEAR = Layout("True", "False", {})


def quantize_trace(
    name: str,
    description: str,
    reference: Callable[..., Any],
    *,
    input: str,
    block: int,
    layout: Layout,
    global_scale: str | None = None,
    extra: Mapping[str, Scalar] | None = None,
    fixed: Mapping[str, object] | None = None,
) -> TraceTemplate:
    """Make the template of a quantisation of ``[..., hidden_size]`` to e2m1.

    ``input`` and ``global_scale`` are names of the op's parameters."""
    inputs: dict[str, Tensor | Scalar] = {
        "hidden_states": Tensor(["*num_tokens", "hidden_size"], param=input)
    }
    axes: dict[str, Var | Const] = {"hidden_size": Const("h"), "*num_tokens": ROWS}
    if global_scale is not None:
        axes["num_global_scales"] = Var("1, or one a row.", sample=1)
        inputs["global_scale"] = Tensor(["num_global_scales"], global_scale, dtype="float32")
    rows, columns = layout.shape(f"(hidden_size // {block})")
    axes["packed_size"] = Const(abbrev="", value="hidden_size // 2")
    axes["scale_rows"] = Const(abbrev="sr", value=rows)
    axes["scale_columns"] = Const(abbrev="sc", value=columns)
    return TraceTemplate(
        op_type="quantization",
        name_prefix=name,
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
    name: str,
    description: str,
    reference: Callable[..., Any],
    *,
    input: str,
    scales: str,
    layout: Layout,
    block: str,
    global_scale: str | None = None,
    elements: str = "uint8",
    output: str = "float32",
    extra: Mapping[str, Scalar] | None = None,
    fixed: Mapping[str, object] | None = None,
) -> TraceTemplate:
    """Make the template of a dequantisation to ``[..., hidden_size]``.

    ``input``, ``scales`` and ``global_scale`` are names of the op's parameters. ``block`` is a
    number or the name of one of ``extra``.
    """
    packed = elements == "uint8"
    axes: dict[str, Var | Const] = {"packed_size": Const(abbrev="")} if packed else {}
    axes["hidden_size"] = Const("h", value="packed_size * 2" if packed else None)
    axes["*num_tokens"] = ROWS
    rows, columns = layout.shape(f"(hidden_size // {block})")
    count = f"{rows} * {columns}"
    axes["*num_scales"] = Var("Scales with their padding, in any shape.", value=count)
    inputs: dict[str, Tensor | Scalar] = {
        "quantized": Tensor(
            ["*num_tokens", "packed_size" if packed else "hidden_size"], input, dtype=elements
        ),
        "scales": Tensor(["*num_scales"], scales, dtype="uint8"),
    }
    if global_scale is not None:
        axes["*one"] = Var("One number, in any shape.", sample=1)
        inputs["global_scale"] = Tensor(["*one"], param=global_scale, dtype="float32")
    return TraceTemplate(
        op_type="quantization",
        name_prefix=name,
        description=description,
        axes=axes,
        inputs={**inputs, **layout.inputs, **(extra or {})},
        outputs={"output": Tensor(["*num_tokens", "hidden_size"], dtype=output)},
        reference=reference,
        fixed=fixed,
        constraints=(f"num_scales == {count}",),
    )


def of_output_dtype(
    template: Callable[..., TraceTemplate], name: str, usual: str, *others: str
) -> Callable[..., TraceTemplate]:
    """A dispatch function on ``output_dtype``: ``template(name, output, fixed)`` for each type."""
    made = {
        word: template(
            name=name if word == usual else f"{name}_to_{word}",
            output=word,
            fixed={} if word == usual else {"output_dtype": Dtype(word)},
        )
        for word in (usual, *others)
    }

    @dispatch(*made.values())
    def choose(output_dtype: Any = None, **arguments: Any) -> TraceTemplate:
        return made[usual if output_dtype is None else str(output_dtype).removeprefix("torch.")]

    return choose
