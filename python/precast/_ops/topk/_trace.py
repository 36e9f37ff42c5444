# SPDX-License-Identifier: Apache-2.0
"""Make the trace templates of top-k, one for each form of the arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from precast._ops.topk._common import LARGE
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

_K = Const("k", "Elements of each row that are chosen.", multiple=2)
LENGTH = Const("n", "Elements of a row.")
_OPTIONAL = {
    "row_starts": "Where the scores of a row start.",
    "page_table_row_starts": "Where the pages of a row start.",
    "row_to_batch": "The request of each row.",
}


def top_k_trace(reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """Dispatch over the order of the results and which of equal ones are preferred."""

    def form_of(sorted: bool = False, tie_break: int = 0, **call: Any) -> tuple[bool, ...]:
        return bool(sorted), tie_break == LARGE

    def template(form: tuple[bool, ...]) -> TraceTemplate:
        is_sorted, large = form
        return TraceTemplate(
            op_type="topk",
            name_prefix="top_k" + "_sorted" * is_sorted + "_large" * large,
            description="Finds the k largest elements of each row",
            axes={"batch_size": Var("Rows."), "d": LENGTH, "k": _K},
            inputs={"input": Tensor(["batch_size", "d"]), "k": Scalar("int32")},
            outputs={
                "values": Tensor(["batch_size", "k"], dtype_from="input"),
                "indices": Tensor(["batch_size", "k"], dtype="int64"),
            },
            constraints=["k <= d"],
            reference=reference,
            fixed={"sorted": is_sorted, **({"tie_break": LARGE} if large else {})},
            fill=in_order,
        )

    return by_form(form_of, template, itertools.product([False, True], repeat=2))


def transform_trace(reference: Callable[..., Any], pages: bool) -> Callable[..., TraceTemplate]:
    """Dispatch over which arguments of rows are given and which of equal ones are preferred."""
    function = reference.__name__.removesuffix("_reference")
    cache = "paged" if pages else "ragged"
    optional = tuple(_OPTIONAL) if pages else ("row_starts",)
    rows = ["num_rows"]

    def form_of(tie_break: int = 0, **call: Any) -> tuple[bool, ...]:
        return *(call.get(name) is not None for name in optional), tie_break == LARGE

    def template(form: tuple[bool, ...]) -> TraceTemplate:
        given = [name for name, is_given in zip(optional, form) if is_given]
        axes: dict[str, Var | Const] = {"num_rows": Var("Queries."), "max_len": LENGTH, "k": _K}
        inputs: dict[str, Tensor | Scalar] = {"input": Tensor(["num_rows", "max_len"])}
        if pages:
            batch = "batch_size" if "row_to_batch" in given else "num_rows"
            axes.update({batch: Var("Requests."), "num_pages": Var("Of the longest request.")})
            inputs["src_page_table"] = Tensor([batch, "num_pages"], dtype="int32")
        else:
            inputs["offsets"] = Tensor(rows, dtype="int32", description="Added to the positions.")
        inputs["lengths"] = Tensor(rows, dtype="int32", description="Scores of each row.")
        inputs["k"] = Scalar("int32")
        for name in given:
            inputs[name] = Tensor(rows, dtype="int32", description=_OPTIONAL[name])
        if pages:
            inputs["page_size"] = Scalar("int32", sample=8)
        return TraceTemplate(
            op_type="topk",
            name_prefix="_".join([function, *given, *["large"] * form[-1]]),
            description=f"Finds the k largest scores of each row, as positions in a {cache} cache",
            axes=axes,
            inputs=inputs,
            outputs={"output_indices": Tensor(["num_rows", "k"], dtype="int32")},
            reference=reference,
            fixed={"tie_break": LARGE} if form[-1] else {},
            fill=_fill,
        )

    return by_form(form_of, template, itertools.product([False, True], repeat=len(optional) + 1))


def in_order(made: dict[str, Any]) -> None:
    """Make calls whose results come in the reference's order."""
    made["deterministic"] = True


def _fill(made: dict[str, Any]) -> None:
    import torch

    in_order(made)
    rows, size = made["input"].shape
    count = torch.arange(rows, dtype=torch.int32, device=made["input"].device)
    made["lengths"] = (count + 1) * size // (rows + 1)
    if "offsets" in made:
        made["offsets"] = count * size
    else:
        table = made["src_page_table"]
        # A row of the table has room for at least as many positions as there are scores.
        pages = torch.arange(table.numel(), dtype=torch.int32, device=table.device)
        made["src_page_table"] = pages.view(table.shape)
        made["page_size"] = 1 << (-(-size // table.shape[1]) - 1).bit_length()
        if "row_starts" in made and "page_table_row_starts" not in made:
            made["page_size"] = 1
            made["lengths"] = (count % 2) + 1
    if "row_starts" in made:
        made["row_starts"] = count % 2
    if "row_to_batch" in made:
        made["row_to_batch"] = count % made["src_page_table"].shape[0]
