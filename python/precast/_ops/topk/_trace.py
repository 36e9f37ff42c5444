# SPDX-License-Identifier: Apache-2.0
"""The trace templates of top-k: one for each form of the arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from precast._ops.topk._formula import LARGE
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_K = Const("k", "Elements of each row that are chosen.", multiple=2)
_LENGTH = Const("n", "Elements of a row.")
_STARTS = {
    "row_starts": "Where the scores of a row start.",
    "page_table_row_starts": "Where the pages of a row start.",
}


def _suffixed(name: str, parts: Iterable[str]) -> str:
    return "_".join([name, *parts])


def top_k_trace(reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """By the order of the results and which of equal ones are preferred."""
    templates = {
        (ordered, large): TraceTemplate(
            op_type="topk",
            name_prefix=_suffixed("top_k", ["sorted"] * ordered + ["large"] * large),
            description="Finds the k largest elements of each row",
            axes={"batch_size": Var("Rows."), "d": _LENGTH, "k": _K},
            inputs={"input": Tensor(["batch_size", "d"]), "k": Scalar("int32")},
            outputs={
                "values": Tensor(["batch_size", "k"], dtype_from="input"),
                "indices": Tensor(["batch_size", "k"], dtype="int64"),
            },
            constraints=["k <= d"],
            reference=reference,
            fixed={"sorted": ordered, **({"tie_break": LARGE} if large else {})},
            fill=_in_order,
        )
        for ordered, large in itertools.product([False, True], repeat=2)
    }

    @dispatch(*templates.values())
    def choose(**call: Any) -> TraceTemplate:
        return templates[bool(call.get("sorted")), call.get("tie_break", 0) == LARGE]

    return choose


def transform_trace(
    function: str, description: str, reference: Callable[..., Any], pages: bool
) -> Callable[..., TraceTemplate]:
    """By which arguments of rows are given and which of equal ones are preferred."""
    optional = ["row_starts", "page_table_row_starts", "row_to_batch"] if pages else ["row_starts"]
    templates = {
        form: _transform(
            function, description, reference, pages, dict(zip(optional, form)), form[-1]
        )
        for form in itertools.product([False, True], repeat=len(optional) + 1)
    }

    @dispatch(*templates.values())
    def choose(**call: Any) -> TraceTemplate:
        form = *(call.get(name) is not None for name in optional), call.get("tie_break", 0) == LARGE
        return templates[form]

    return choose


def _transform(
    function: str,
    description: str,
    reference: Callable[..., Any],
    pages: bool,
    given: dict[str, bool],
    large: bool,
) -> TraceTemplate:
    rows = ["num_rows"]
    axes: dict[str, Var | Const] = {"num_rows": Var("Queries."), "max_len": _LENGTH, "k": _K}
    inputs: dict[str, Tensor | Scalar] = {"input": Tensor(["num_rows", "max_len"])}
    if pages:
        batch = "batch_size" if given["row_to_batch"] else "num_rows"
        axes.update({batch: Var("Requests."), "num_pages": Var("Of the longest request.")})
        inputs["src_page_table"] = Tensor([batch, "num_pages"], dtype="int32")
    else:
        inputs["offsets"] = Tensor(rows, dtype="int32", description="Added to the positions.")
    inputs["lengths"] = Tensor(rows, dtype="int32", description="Scores of each row.")
    inputs["k"] = Scalar("int32")
    names = [name for name, is_given in given.items() if is_given]
    for name in names:
        text = _STARTS.get(name, "The request of each row.")
        inputs[name] = Tensor(rows, dtype="int32", description=text)
    if pages:
        inputs["page_size"] = Scalar("int32", sample=8)
    return TraceTemplate(
        op_type="topk",
        name_prefix=_suffixed(function, [*names, *["large"] * large]),
        description=description,
        axes=axes,
        inputs=inputs,
        outputs={"output_indices": Tensor(["num_rows", "k"], dtype="int32")},
        reference=reference,
        fixed={"tie_break": LARGE} if large else {},
        fill=_fill,
    )


def _in_order(made: dict[str, Any]) -> None:
    """Calls whose results come in the reference's order."""
    made["deterministic"] = True


def _fill(made: dict[str, Any]) -> None:
    import torch

    _in_order(made)
    rows, size = made["input"].shape
    count = torch.arange(rows, dtype=torch.int32, device=made["input"].device)
    made["lengths"] = (count + 1) * size // (rows + 1)
    made["page_size"] = 1
    if "offsets" in made:
        made["offsets"] = count * size
        del made["page_size"]
    else:
        table = made["src_page_table"]
        # As many as there are scores.
        made["src_page_table"] = torch.arange(
            table.shape[0] * table.shape[1], dtype=torch.int32, device=table.device
        ).view(table.shape)
        made["page_size"] = -(-size // table.shape[1])
        made["page_size"] = 1 << (made["page_size"] - 1).bit_length()
        if "row_starts" in made and "page_table_row_starts" not in made:
            made["page_size"] = 1
            made["lengths"] = (count % 2) + 1
    if "row_starts" in made:
        made["row_starts"] = count % 2
    if "row_to_batch" in made:
        made["row_to_batch"] = count % made["src_page_table"].shape[0]
