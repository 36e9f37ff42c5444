# SPDX-License-Identifier: Apache-2.0
"""The trace of a norm: rows of a hidden size, or of each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_ROWS: dict[str, Var | Const] = {
    "batch_size": Var("Rows: tokens of all requests."),
    "hidden_size": Const("h"),
}
_HEADS: dict[str, Var | Const] = {
    "batch_size": Var("Tokens of all requests."),
    "num_heads": Const("n"),
    "head_dim": Const("d"),
}


def rows_axes() -> dict[str, Var | Const]:
    """Of ``[batch_size, hidden_size]``."""
    return dict(_ROWS)


def heads_axes() -> dict[str, Var | Const]:
    """Of ``[batch_size, num_heads, head_dim]``."""
    return dict(_HEADS)


def axes_of(input: Any) -> int:
    """How many dimensions the input of a call has, if it is a tensor."""
    return int(getattr(input, "ndim", 2))


def norm_trace(
    name: str,
    description: str,
    reference: Callable[..., Any],
    *,
    rows: Mapping[str, str],
    outputs: Mapping[str, str],
    vectors: Sequence[str] = ("weight",),
    vector_dtype: str | None = None,
    op_type: str = "rmsnorm",
) -> Callable[..., TraceTemplate]:
    """Templates for ``[batch_size, hidden_size]`` and ``[batch_size, num_heads, head_dim]``.

    ``rows`` and ``outputs`` give the parameter of each tensor of such a shape; ``vectors`` are
    parameters that have the last axis alone.
    """

    def template(suffix: str, axes: Mapping[str, Var | Const]) -> TraceTemplate:
        last = list(axes)[-1:]
        return TraceTemplate(
            op_type=op_type,
            name_prefix=name + suffix,
            description=description,
            axes=axes,
            inputs={
                **{row: Tensor([*axes], param=param) for row, param in rows.items()},
                **{vector: Tensor(last, dtype=vector_dtype) for vector in vectors},
                "eps": Scalar("float32"),
            },
            outputs={
                row: Tensor([*axes], dtype_from="hidden_states", param=param)
                for row, param in outputs.items()
            },
            reference=reference,
        )

    of_rows, of_heads = template("", _ROWS), template("_heads", _HEADS)

    @dispatch(of_rows, of_heads)
    def by_rank(input: Any, **others: Any) -> TraceTemplate:
        return of_heads if axes_of(input) == 3 else of_rows

    return by_rank
