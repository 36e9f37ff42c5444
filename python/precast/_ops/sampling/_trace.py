# SPDX-License-Identifier: Apache-2.0
"""The trace templates of sampling: one for each form of the arguments of a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from precast._ops.sampling._arguments import is_joint
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

VOCABULARY = Const("v", "Tokens of the vocabulary.")
SEED = Scalar("int64", description="Key of the random numbers.", sample=7)
OFFSET = Scalar("int64", description="Counter of the random numbers.", sample=4)

#: Element type, a value of generated calls, and a text.
_NUMBERS = {
    "temperature": ("float32", 0.75, "What logits are divided by."),
    "top_k": ("int32", 20, "Most tokens that are kept, but for ties."),
    "top_p": ("float32", 0.75, "Share of the mass that is kept at least."),
    "min_p": ("float32", 0.0625, "Least share of the largest probability."),
    "repetition_penalty": ("float32", 1.25, ""),
    "frequency_penalty": ("float32", 0.25, ""),
    "presence_penalty": ("float32", 0.5, ""),
}
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_MASKS = ("prompt_mask", "output_counts", "bitmask")


# -- forms of calls -------------------------------------------------------------------------------


def is_tensor(value: object) -> bool:
    """Whether an argument is no number; torch is not imported for it."""
    return hasattr(value, "shape")


class Form(NamedTuple):
    """How the arguments of a call are given."""

    by_row: tuple[str, ...] = ()  # filters and penalties that are tensors
    given: tuple[str, ...] = ()  # indices and masks
    joint: bool = False
    seeds: bool = False  # seed and offset are tensors


def form_of(function: str, **call: Any) -> Form:
    """The form of a call of a function that draws."""
    return Form(
        tuple(name for name in _NUMBERS if is_tensor(call.get(name))),
        tuple(name for name in ("indices", *_MASKS) if call.get(name) is not None),
        is_joint(function, call.get("filter_apply_order", "top_k_first")),
        is_tensor(call.get("seed")),
    )


F = TypeVar("F", bound=Hashable)


def _by_form(
    find: Callable[..., F], make: Callable[[F], TraceTemplate], usual: Iterable[F]
) -> Callable[..., TraceTemplate]:
    """A dispatch function over the forms of a call, of which there are too many to make them all.

    What it lists begins with the usual ones; that of another form is made at its first call.
    """
    templates = {form: make(form) for form in usual}

    def choose(**call: Any) -> TraceTemplate:
        form = find(**call)
        if form not in templates:
            templates.setdefault(form, make(form))  # Another thread may have been first.
        return templates[form]

    function: Any = choose
    function.templates = templates.values()  # It grows with them.
    return choose


# -- draws ----------------------------------------------------------------------------------------


def draw_trace(
    function: str, kind: str, filters: Sequence[str], reference: Callable[..., Any]
) -> Callable[..., TraceTemplate]:
    """A dispatch function over numbers or rows of each filter, indices, order and seeds."""

    def template(form: Form) -> TraceTemplate:
        rows = "num_rows" if form.given else "batch_size"
        axes: dict[str, Var | Const] = {rows: Var("Distributions.")}
        inputs: dict[str, Tensor | Scalar] = {kind: Tensor([rows, "vocab_size"])}
        for name in filters:
            dtype, sample, text = _NUMBERS[name]
            by_row = Tensor([rows], dtype=dtype, description=text)
            number = Scalar(dtype, description=text, sample=sample)
            inputs[name] = by_row if name in form.by_row else number
        if form.given:
            axes["batch_size"] = Var("Tokens drawn.")
            text = "The distribution of each token."
            inputs["indices"] = Tensor(["batch_size"], dtype="int32", description=text)
        words = [f"{name}_by_row" for name in form.by_row] + ["indexed"] * bool(form.given)
        words += ["seeds"] * form.seeds + ["joint"] * form.joint
        return _template(
            form,
            "_".join([function, *words]),
            f"Draws a token from each distribution of {kind}"
            + (f", filtered by {' and '.join(filters)}" if filters else ""),
            {**axes, "vocab_size": VOCABULARY},
            inputs,
            "samples",
            reference,
            has_order=len(filters) > 1,
        )

    subsets = (itertools.combinations(filters, n) for n in range(len(filters) + 1))
    by_row = itertools.chain.from_iterable(subsets)
    orders = [False, True] if len(filters) > 1 else [False]
    usual = itertools.starmap(Form, itertools.product(by_row, [(), ("indices",)], orders))
    return _by_form(lambda **call: form_of(function, **call), template, [*usual, Form(seeds=True)])


def _template(
    form: Form,
    name: str,
    description: str,
    axes: dict[str, Var | Const],
    inputs: dict[str, Tensor | Scalar],
    output: str,
    reference: Callable[..., Any],
    has_order: bool,
) -> TraceTemplate:
    """The template of a form, with the seeds and the order that it has."""
    inputs = {**inputs, "seed": SEED, "offset": OFFSET}
    if form.seeds:
        sizes = Var("1, or one for each token.", value="batch_size")
        axes = {**axes, "num_seeds": sizes, "num_offsets": sizes}
        text = "Keys: one, or one for each token."
        inputs["seed"] = Tensor(["num_seeds"], dtype="int64", description=text)
        inputs["offset"] = Tensor(["num_offsets"], dtype="int64", description="Counters, likewise.")
    order = "joint" if form.joint else "top_k_first"
    return TraceTemplate(
        op_type="sampling",
        name_prefix=name,
        description=description,
        axes=axes,
        inputs=inputs,
        outputs={output: Tensor(["batch_size"], dtype="int32")},
        reference=reference,
        fixed={"filter_apply_order": order} if has_order else {},
        fill=_fill,
    )


# -- sample ---------------------------------------------------------------------------------------

_USUAL = (
    Form(),
    Form(joint=True),
    Form(seeds=True),
    Form(_FILTERS),
    Form(("temperature",), joint=True),
    Form(("top_k", "top_p"), ("bitmask",)),
    Form(("repetition_penalty",), ("prompt_mask",)),
    Form((), _MASKS),
    Form(tuple(_NUMBERS), _MASKS),
    Form(tuple(_NUMBERS), _MASKS, True, True),
)


def name_of(form: Form) -> str:
    """What the definition of a call of ``sample`` is called."""
    rows = [name.removesuffix("_penalty") for name in form.by_row]
    words = ["sample", *rows, *["by_row"] * bool(rows), *form.given]
    return "_".join([*words, *["seeds"] * form.seeds, *["joint"] * form.joint])


def sample_trace(reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """A dispatch function over the forms of a call."""

    def template(form: Form) -> TraceTemplate:
        rows = ["batch_size"]
        axes: dict[str, Var | Const] = {"batch_size": Var("Rows."), "vocab_size": VOCABULARY}
        inputs: dict[str, Tensor | Scalar] = {"logits": Tensor([*rows, "vocab_size"])}
        # Penalties that have tokens to lower.
        counted = "output_counts" in form.given
        names = [*_FILTERS, *["repetition_penalty"] * (counted or "prompt_mask" in form.given)]
        for name in [*names, *["frequency_penalty", "presence_penalty"] * counted]:
            dtype, sample, _ = _NUMBERS[name]
            by_row = name in form.by_row
            inputs[name] = Tensor(rows, dtype=dtype) if by_row else Scalar(dtype, sample=sample)
        for name in form.given:
            inputs[name] = Tensor([*rows, "vocab_size"], dtype="int32")
            if name != "output_counts":
                axes["mask_words"] = Const("", value="(vocab_size + 31) // 32")
                text = "A bit each token."
                inputs[name] = Tensor([*rows, "mask_words"], dtype="int32", description=text)
        text = "Draws a token from logits by temperature, top-k, top-p and min-p"
        text += f", with {' and '.join(form.given)}" if form.given else ""
        return _template(
            form, name_of(form), text, axes, inputs, "tokens", reference, has_order=True
        )

    return _by_form(lambda **call: form_of("sample", **call), template, _USUAL)


# -- rows -----------------------------------------------------------------------------------------


def rows_trace(
    function: str,
    kind: str,
    number: str,
    reference: Callable[..., Any],
    output: str,
    dtype: str | None = None,
) -> Callable[..., TraceTemplate]:
    """A dispatch function of what makes rows of rows, by a number or one for each row."""
    number_dtype, sample, text = _NUMBERS[number]
    shape = ["batch_size", "vocab_size"]

    def template(by_row: bool) -> TraceTemplate:
        scalar = Scalar(number_dtype, description=text, sample=sample)
        tensor = Tensor(["batch_size"], dtype=number_dtype, description=text)
        return TraceTemplate(
            op_type="sampling",
            name_prefix=f"{function}_by_row" if by_row else function,
            description=f"{output[0].upper()}{output[1:]} of each row of {kind}, by {number}",
            axes={"batch_size": Var("Rows."), "vocab_size": VOCABULARY},
            inputs={kind: Tensor(shape), number: tensor if by_row else scalar},
            outputs={output: Tensor(shape, dtype=dtype, dtype_from=None if dtype else kind)},
            reference=reference,
            fill=_fill,
        )

    return _by_form(lambda **call: is_tensor(call.get(number)), template, (False, True))


def _fill(made: dict[str, Any]) -> None:
    """Numbers by row that keep different tokens, indices of every row, masks, and seeds."""
    import torch

    for name, value in made.items():
        if not isinstance(value, torch.Tensor):
            continue
        count = torch.arange(value.numel(), device=value.device).view(value.shape)
        if name == "top_k":
            made[name] = (count + 2).to(value.dtype)
        elif name in _FILTERS:
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
