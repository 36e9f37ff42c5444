# SPDX-License-Identifier: Apache-2.0
"""The trace templates of functions that draw tokens: one for each form of their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

VOCABULARY = Const("v", "Tokens of the vocabulary.")
SEED = Scalar("int64", description="Key of the random numbers.", sample=7)
OFFSET = Scalar("int64", description="Counter of the random numbers.", sample=4)

_FILTERS = {
    "top_k": ("int32", 20, "Most tokens that are kept, but for ties."),
    "top_p": ("float32", 0.75, "Share of the mass that is kept at least."),
    "min_p": ("float32", 0.25, "Least share of the largest probability."),
    "temperature": ("float32", 0.75, "What logits are divided by."),
}


def fill(made: dict[str, Any]) -> None:
    """Filters by row that keep different numbers of tokens, and indices of every row."""
    import torch

    for name, value in made.items():
        if not isinstance(value, torch.Tensor):
            continue
        count = torch.arange(value.shape[0], device=value.device)
        if name == "top_k":
            made[name] = (count + 2).to(value.dtype)
        elif name in ("top_p", "min_p", "temperature"):
            made[name] = ((count % 8 + 1) / 16).to(value.dtype)
        elif name == "indices":
            rows = next(iter(made.values())).shape[0]
            made[name] = (count % rows).to(value.dtype)


def draw_trace(
    function: str,
    kind: str,
    filters: Sequence[str],
    reference: Callable[..., Any],
    orders: Sequence[str] = ("top_k_first",),
) -> Callable[..., TraceTemplate]:
    """A dispatch function over numbers or rows of each filter, indices and the filters' order."""
    forms = itertools.product([False, True], repeat=len(filters))
    templates = {
        form: _template(function, kind, dict(zip(filters, form[0])), *form[1:], reference)
        for form in itertools.product(forms, [False, True], orders)
    }

    @dispatch(*templates.values())
    def choose(**call: Any) -> TraceTemplate:
        by_row = tuple(hasattr(call.get(name), "shape") for name in filters)
        order = call.get("filter_apply_order", "top_k_first")
        return templates[by_row, call.get("indices") is not None, order]

    return choose


def _template(
    function: str,
    kind: str,
    by_row: dict[str, bool],
    indexed: bool,
    order: str,
    reference: Callable[..., Any],
) -> TraceTemplate:
    rows = "num_rows" if indexed else "batch_size"
    axes: dict[str, Var | Const] = {rows: Var("Distributions.")}
    if indexed:
        axes["batch_size"] = Var("Tokens drawn.")
    inputs: dict[str, Tensor | Scalar] = {kind: Tensor([rows, "vocab_size"])}
    for name, of_row in by_row.items():
        dtype, sample, text = _FILTERS[name]
        if of_row:
            inputs[name] = Tensor([rows], dtype=dtype, description=text)
        else:
            inputs[name] = Scalar(dtype, description=text, sample=sample)
    if indexed:
        inputs["indices"] = Tensor(
            ["batch_size"], dtype="int32", description="The distribution of each token."
        )
    suffixes = [f"{name}_by_row" for name, of_row in by_row.items() if of_row]
    suffixes += ["indexed"] if indexed else []
    suffixes += ["joint"] if order == "joint" else []
    return TraceTemplate(
        op_type="sampling",
        name_prefix="_".join([function, *suffixes]),
        description=f"Draws a token from each distribution of {kind}"
        + (", cut down by " + " and ".join(by_row) if by_row else ""),
        axes={**axes, "vocab_size": VOCABULARY},
        inputs={**inputs, "seed": SEED, "offset": OFFSET},
        outputs={"samples": Tensor(["batch_size"], dtype="int32")},
        reference=reference,
        fixed={"filter_apply_order": order} if "top_p" in by_row and "top_k" in by_row else {},
        fill=fill,
    )


def rows_trace(
    function: str,
    kind: str,
    parameter: str,
    reference: Callable[..., Any],
    output: str,
    dtype: str | None = None,
) -> Callable[..., TraceTemplate]:
    """A dispatch function of what makes rows of rows, by a number or one for each row."""
    dtype_of, sample, text = _FILTERS[parameter]
    numbers = Scalar(dtype_of, description=text, sample=sample)
    by_row = Tensor(["batch_size"], dtype=dtype_of, description=text)
    shape = ["batch_size", "vocab_size"]
    templates = [
        TraceTemplate(
            op_type="sampling",
            name_prefix=name,
            description=f"{output[0].upper()}{output[1:]} of each row of {kind}, by {parameter}",
            axes={"batch_size": Var("Rows."), "vocab_size": VOCABULARY},
            inputs={kind: Tensor(shape), parameter: given},
            outputs={output: Tensor(shape, dtype=dtype, dtype_from=None if dtype else kind)},
            reference=reference,
            fill=fill,
        )
        for name, given in ((function, numbers), (f"{function}_by_row", by_row))
    ]

    @dispatch(*templates)
    def choose(**call: Any) -> TraceTemplate:
        return templates[hasattr(call.get(parameter), "shape")]

    return choose
