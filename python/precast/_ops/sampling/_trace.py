# SPDX-License-Identifier: Apache-2.0
"""The trace templates of functions that draw tokens: one for each form of their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from precast._ops.sampling._arguments import is_joint
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


#: A seed and an offset as tensors, and the axes that they have.
SEEDS: dict[str, Tensor | Scalar] = {
    "seed": Tensor(["num_seeds"], dtype="int64", description="Keys: one, or one for each token."),
    "offset": Tensor(["num_offsets"], dtype="int64", description="Counters, likewise."),
}
SEED_AXES: dict[str, Var | Const] = {
    "num_seeds": Var("1, or one for each token.", value="batch_size"),
    "num_offsets": Var("1, or one for each token.", value="batch_size"),
}


def fill(made: dict[str, Any]) -> None:
    """Filters by row that keep different numbers of tokens, indices of every row, and seeds."""
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
        elif name in ("seed", "offset"):
            made[name] = 4 * count


def is_tensor(value: object) -> bool:
    """Whether an argument is no number; torch is not imported for it."""
    return hasattr(value, "shape")


Form = TypeVar("Form", bound=Hashable)


def by_form(
    form_of: Callable[..., Form], make: Callable[[Form], TraceTemplate], usual: Iterable[Form]
) -> Callable[..., TraceTemplate]:
    """A dispatch function over the forms of a call, of which there are too many to make them all.

    What it lists begins with the usual ones; that of another form is made at its first call.
    """
    templates = {form: make(form) for form in usual}

    def choose(**call: Any) -> TraceTemplate:
        form = form_of(**call)
        if form not in templates:
            templates.setdefault(form, make(form))  # Another thread may have been first.
        return templates[form]

    function: Any = choose
    function.templates = templates.values()  # It grows with them.
    return choose


class _Draw(NamedTuple):
    """How the arguments of a draw are given."""

    by_row: tuple[str, ...] = ()  # filters that are tensors
    indexed: bool = False
    joint: bool = False
    seeds: bool = False  # seed and offset are tensors


def draw_trace(
    function: str, kind: str, filters: Sequence[str], reference: Callable[..., Any]
) -> Callable[..., TraceTemplate]:
    """A dispatch function over numbers or rows of each filter, indices, order and seeds."""

    def form_of(**call: Any) -> _Draw:
        return _Draw(
            tuple(name for name in filters if is_tensor(call.get(name))),
            call.get("indices") is not None,
            is_joint(function, call.get("filter_apply_order", "top_k_first")),
            is_tensor(call.get("seed")),
        )

    by_row = [tuple(itertools.compress(filters, c)) for c in _choices(len(filters))]
    joint = [False, True] if len(filters) > 1 else [False]
    usual = itertools.starmap(_Draw, itertools.product(by_row, [False, True], joint))
    return by_form(
        form_of,
        lambda form: _template(function, kind, filters, form, reference),
        [*usual, _Draw(seeds=True)],
    )


def _choices(count: int) -> Iterator[tuple[bool, ...]]:
    return itertools.product([False, True], repeat=count)


def _template(
    function: str, kind: str, filters: Sequence[str], form: _Draw, reference: Callable[..., Any]
) -> TraceTemplate:
    rows = "num_rows" if form.indexed else "batch_size"
    axes: dict[str, Var | Const] = {rows: Var("Distributions.")}
    if form.indexed:
        axes["batch_size"] = Var("Tokens drawn.")
    inputs: dict[str, Tensor | Scalar] = {kind: Tensor([rows, "vocab_size"])}
    for name in filters:
        dtype, sample, text = _FILTERS[name]
        if name in form.by_row:
            inputs[name] = Tensor([rows], dtype=dtype, description=text)
        else:
            inputs[name] = Scalar(dtype, description=text, sample=sample)
    if form.indexed:
        inputs["indices"] = Tensor(
            ["batch_size"], dtype="int32", description="The distribution of each token."
        )
    suffixes = [f"{name}_by_row" for name in form.by_row]
    suffixes += ["indexed"] * form.indexed + ["seeds"] * form.seeds + ["joint"] * form.joint
    order = "joint" if form.joint else "top_k_first"
    return TraceTemplate(
        op_type="sampling",
        name_prefix="_".join([function, *suffixes]),
        description=f"Draws a token from each distribution of {kind}"
        + (", cut down by " + " and ".join(filters) if filters else ""),
        axes={**axes, "vocab_size": VOCABULARY, **(SEED_AXES if form.seeds else {})},
        inputs={**inputs, **(SEEDS if form.seeds else {"seed": SEED, "offset": OFFSET})},
        outputs={"samples": Tensor(["batch_size"], dtype="int32")},
        reference=reference,
        fixed={"filter_apply_order": order} if len(filters) > 1 else {},
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
        return templates[is_tensor(call.get(parameter))]

    return choose
