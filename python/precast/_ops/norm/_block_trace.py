# SPDX-License-Identifier: Apache-2.0
"""The trace of a norm with a scale for each group of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_SCALES = {
    True: ["num_groups", "padded_batch_size"],
    False: ["batch_size", "num_groups"],
}


def block_quant_trace(reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """Templates for column-major and row-major scales, of rows."""

    def template(column_major: bool) -> TraceTemplate:
        rows, scales = ["batch_size", "hidden_size"], _SCALES[column_major]
        axes: dict[str, Var | Const] = {
            "batch_size": Var("Rows: tokens of all requests."),
            "hidden_size": Const("h", "A multiple of 128.", multiple=128),
            "num_groups": Const(
                "", "Groups of 128 columns, which share a scale.", value="hidden_size // 128"
            ),
        }
        if column_major:
            axes["padded_batch_size"] = Var(
                "batch_size rounded up to a multiple of 4.", value="(batch_size + 3) // 4 * 4"
            )
        return TraceTemplate(
            op_type="rmsnorm",
            name_prefix="fused_add_rmsnorm_fp8_block_quant"
            + ("" if column_major else "_row_major_scales"),
            description="The sum of two tensors, and the norm of each row of it in fp8, with a "
            "scale for each 128 columns.",
            axes=axes,
            inputs={
                "out": Tensor(rows, dtype="float8_e4m3fn", description="Not read."),
                "block_scale": Tensor(scales, dtype="float32", description="Its padding is kept."),
                "normed_out": Tensor(rows, description="Not read."),
                "hidden_states": Tensor(rows, param="input"),
                "residual": Tensor(rows),
                "weight": Tensor(["hidden_size"]),
                "eps": Scalar("float32"),
                "column_major_scales": Scalar("bool", sample=column_major),
                "scale_ue8m0": Scalar("bool"),
            },
            outputs={
                "output": Tensor(rows, param="out", dtype="float8_e4m3fn"),
                "scale": Tensor(scales, param="block_scale", dtype="float32"),
                "normed": Tensor(rows, param="normed_out", dtype_from="hidden_states"),
                "residual_out": Tensor(rows, param="residual", dtype_from="hidden_states"),
            },
            reference=reference,
        )

    templates = {True: template(True), False: template(False)}

    @dispatch(*templates.values())
    def by_layout(column_major_scales: Any, **others: Any) -> TraceTemplate:
        return templates[bool(column_major_scales)]

    return by_layout
