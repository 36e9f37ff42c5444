# SPDX-License-Identifier: Apache-2.0
"""Make the trace templates of sampling, one for each form of the arguments of a call."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from precast._ops.sampling._arguments import FILTERS, NUMBERS, PENALTIES, is_joint
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

VOCABULARY = Const("v", "Tokens of the vocabulary.")
SEED = Scalar("int64", description="Key of the random numbers.", sample=7)
OFFSET = Scalar("int64", description="Counter of the random numbers.", sample=4)

#: The element type, a value for generated calls, and the description.
_NUMBERS = {
    "temperature": ("float32", 0.75, "What logits are divided by."),
    "top_k": ("int32", 20, "Most tokens that are kept, but for ties."),
    "top_p": ("float32", 0.75, "Share of the mass that is kept at least."),
    "min_p": ("float32", 0.0625, "Least share of the largest probability."),
    "repetition_penalty": ("float32", 1.25, ""),
    "frequency_penalty": ("float32", 0.25, ""),
    "presence_penalty": ("float32", 0.5, ""),
}
#: The shapes of optional tensors, and their descriptions.
_GIVEN = {
    "indices": (["batch_size"], "The distribution of each token."),
    "prompt_mask": (["batch_size", "mask_words"], "A bit each token."),
    "output_counts": (["batch_size", "vocab_size"], ""),
    "bitmask": (["batch_size", "mask_words"], "A bit each token."),
}
_MASKS = ("prompt_mask", "output_counts", "bitmask")


# -- forms of calls -------------------------------------------------------------------------------


def is_tensor(value: object) -> bool:
    """Return whether an argument is not a number, without importing torch."""
    return hasattr(value, "shape")


class Form(NamedTuple):
    """How the arguments of a call are given."""

    by_row: tuple[str, ...] = ()  # filters and penalties that are tensors
    given: tuple[str, ...] = ()  # indices and masks that are there
    joint: bool = False
    seeds: bool = False  # seed and offset are tensors


def form_of(function: str, **call: Any) -> Form:
    """Return the form of a call of a function that draws."""
    return Form(
        tuple(name for name in NUMBERS if is_tensor(call.get(name))),
        tuple(name for name in _GIVEN if call.get(name) is not None),
        is_joint(function, call.get("filter_apply_order", "top_k_first")),
        is_tensor(call.get("seed")),
    )


def _number(name: str, rows: str, by_row: bool, is_described: bool = True) -> Tensor | Scalar:
    """Return the input of a filter or a penalty."""
    dtype, sample, text = _NUMBERS[name]
    about = text if is_described else ""
    if by_row:
        return Tensor([rows], dtype=dtype, description=about)
    return Scalar(dtype, description=about, sample=sample)


# -- draws ----------------------------------------------------------------------------------------

#: The forms of ``sample`` that are listed first.
_USUAL = (
    Form(),
    Form(joint=True),
    Form(seeds=True),
    Form(("temperature", *FILTERS)),
    Form(("temperature",), joint=True),
    Form(("top_k", "top_p"), ("bitmask",)),
    Form(("repetition_penalty",), ("prompt_mask",)),
    Form((), _MASKS),
    Form(NUMBERS, _MASKS),
    Form(NUMBERS, _MASKS, True, True),
)


def _usual(filters: Sequence[str]) -> list[Form]:
    """Return the forms of a draw with these filters, but for most of those with seeds."""
    subsets = (itertools.combinations(filters, n) for n in range(len(filters) + 1))
    by_row = itertools.chain.from_iterable(subsets)
    orders = [False, True] if len(filters) > 1 else [False]
    forms = itertools.starmap(Form, itertools.product(by_row, [(), ("indices",)], orders))
    return [*forms, Form(seeds=True)]


def name_of(function: str, form: Form) -> str:
    """Return the beginning of the name of a definition."""
    if function == "sample":
        words = [name.removesuffix("_penalty") for name in form.by_row]
        words += ["by_row"] * bool(words)
    else:
        words = [f"{name}_by_row" for name in form.by_row]
    words += ["indexed" if name == "indices" else name for name in form.given]
    return "_".join([function, *words, *["seeds"] * form.seeds, *["joint"] * form.joint])


def draw_trace(
    function: str, x: str, filters: Sequence[str], reference: Callable[..., Any]
) -> Callable[..., TraceTemplate]:
    """Dispatch over numbers or rows of each filter, optional tensors, order and seeds.

    ``sample`` has all filters, and penalties.
    """
    is_sample = function == "sample"
    description = (
        "Draws a token from logits by temperature, top-k, top-p and min-p"
        if is_sample
        else f"Draws a token from each distribution of {x}"
        + (f", filtered by {' and '.join(filters)}" if filters else "")
    )

    def template(form: Form) -> TraceTemplate:
        axes: dict[str, Var | Const] = {
            "batch_size": Var("Rows." if is_sample else "Distributions.")
        }
        if "indices" in form.given:
            axes = {"num_rows": Var("Distributions."), "batch_size": Var("Tokens drawn.")}
        axes["vocab_size"] = VOCABULARY
        rows = next(iter(axes))
        inputs: dict[str, Tensor | Scalar] = {x: Tensor([rows, "vocab_size"])}
        # Penalties apply to the tokens of the masks.
        counted = "output_counts" in form.given
        repeats = counted or "prompt_mask" in form.given
        for name in (*filters, *PENALTIES[:1] * repeats, *PENALTIES[1:] * counted):
            inputs[name] = _number(name, rows, name in form.by_row, is_described=not is_sample)
        for name in form.given:
            shape, about = _GIVEN[name]
            inputs[name] = Tensor(shape, dtype="int32", description=about)
            if "mask_words" in shape:
                axes["mask_words"] = Const("", value="(vocab_size + 31) // 32")
        inputs.update(seed=SEED, offset=OFFSET)
        if form.seeds:
            sizes = Var("1, or one for each token.", value="batch_size")
            axes.update(num_seeds=sizes, num_offsets=sizes)
            about = "Keys: one, or one for each token."
            inputs["seed"] = Tensor(["num_seeds"], dtype="int64", description=about)
            about = "Counters, likewise."
            inputs["offset"] = Tensor(["num_offsets"], dtype="int64", description=about)
        masks = f", with {' and '.join(form.given)}" if is_sample and form.given else ""
        order = "joint" if form.joint else "top_k_first"
        return TraceTemplate(
            op_type="sampling",
            name_prefix=name_of(function, form),
            description=description + masks,
            axes=axes,
            inputs=inputs,
            outputs={"tokens" if is_sample else "samples": Tensor(["batch_size"], dtype="int32")},
            reference=reference,
            fixed={"filter_apply_order": order} if len(filters) > 1 else {},
            fill=_fill,
        )

    usual = _USUAL if is_sample else _usual(filters)
    return by_form(lambda **call: form_of(function, **call), template, usual)


# -- rows -----------------------------------------------------------------------------------------


def rows_trace(
    reference: Callable[..., Any], output: str, dtype: str | None = None
) -> Callable[..., TraceTemplate]:
    """Dispatch over a number for all rows or one for each, for a function that returns rows."""
    function = reference.__name__.removesuffix("_reference")
    kind, number = inspect.signature(reference).parameters
    shape = ["batch_size", "vocab_size"]

    def template(by_row: bool) -> TraceTemplate:
        return TraceTemplate(
            op_type="sampling",
            name_prefix=f"{function}_by_row" if by_row else function,
            description=f"{output[0].upper()}{output[1:]} of each row of {kind}, by {number}",
            axes={"batch_size": Var("Rows."), "vocab_size": VOCABULARY},
            inputs={kind: Tensor(shape), number: _number(number, "batch_size", by_row)},
            outputs={output: Tensor(shape, dtype=dtype, dtype_from=None if dtype else kind)},
            reference=reference,
            fill=_fill,
        )

    return by_form(lambda **call: is_tensor(call.get(number)), template, (False, True))


def _fill(made: dict[str, Any]) -> None:
    """Make rows keep different tokens, and fill in indices, masks and seeds."""
    import torch

    for name, value in made.items():
        if not isinstance(value, torch.Tensor):
            continue
        count = torch.arange(value.numel(), device=value.device).view(value.shape)
        if name == "top_k":
            made[name] = (count + 2).to(value.dtype)
        elif name in ("temperature", *FILTERS):
            made[name] = ((count % 8 + 1) / 16).to(value.dtype)
        elif name.endswith("_penalty"):
            made[name] = (count % 4 + 2) / 2
        elif name == "indices":
            rows = next(iter(made.values())).shape[0]
            made[name] = (count % rows).to(value.dtype)
        elif name in ("seed", "offset"):
            made[name] = 4 * count
        elif name == "output_counts":
            made[name] = (count % 3).to(torch.int32)
        elif name in _MASKS:
            made[name] = (count * 0x5BD1E995).to(torch.int32)
