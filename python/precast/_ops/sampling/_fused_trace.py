# SPDX-License-Identifier: Apache-2.0
"""The trace templates of ``sample``: what a call gives as numbers, by row, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from precast._ops.sampling._arguments import is_joint
from precast._ops.sampling._trace import (
    OFFSET,
    SEED,
    SEED_AXES,
    SEEDS,
    VOCABULARY,
    by_form,
    fill,
    is_tensor,
)
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

#: Element type, and a value of generated calls.
_NUMBERS = {
    "temperature": ("float32", 0.75),
    "top_k": ("int32", 20),
    "top_p": ("float32", 0.75),
    "min_p": ("float32", 0.0625),
    "repetition_penalty": ("float32", 1.25),
    "frequency_penalty": ("float32", 0.25),
    "presence_penalty": ("float32", 0.5),
}
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_MASKS = ("prompt_mask", "output_counts", "bitmask")


class _Form(NamedTuple):
    """How the arguments of a call are given."""

    by_row: tuple[str, ...] = ()  # filters and penalties that are tensors
    masks: tuple[str, ...] = ()  # those that are there
    seeds: bool = False  # seed and offset are tensors
    joint: bool = False

    def numbers(self) -> Iterator[str]:
        """Filters, and penalties that have tokens to lower."""
        yield from _FILTERS
        if "prompt_mask" in self.masks or "output_counts" in self.masks:
            yield "repetition_penalty"
        if "output_counts" in self.masks:
            yield from ("frequency_penalty", "presence_penalty")

    def name(self) -> str:
        rows = [name.removesuffix("_penalty") for name in self.by_row]
        rows += ["by_row"] if rows else []
        return "_".join(
            ["sample", *rows, *self.masks, *["seeds"] * self.seeds, *["joint"] * self.joint]
        )


def _form_of(**call: Any) -> _Form:
    return _Form(
        tuple(name for name in _NUMBERS if is_tensor(call.get(name))),
        tuple(name for name in _MASKS if call.get(name) is not None),
        is_tensor(call.get("seed")),
        is_joint("sample", call.get("filter_apply_order", "top_k_first")),
    )


_USUAL = (
    _Form(),
    _Form(joint=True),
    _Form(seeds=True),
    _Form(_FILTERS),
    _Form(("temperature",), joint=True),
    _Form(("top_k", "top_p"), ("bitmask",)),
    _Form(("repetition_penalty",), ("prompt_mask",)),
    _Form((), _MASKS),
    _Form(tuple(_NUMBERS), _MASKS),
    _Form(tuple(_NUMBERS), _MASKS, True, True),
)


def sample_trace(reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """A dispatch function over the forms of a call."""
    return by_form(_form_of, lambda form: _template(form, reference), _USUAL)


def _template(form: _Form, reference: Callable[..., Any]) -> TraceTemplate:
    rows = ["batch_size"]
    axes: dict[str, Var | Const] = {"batch_size": Var("Rows."), "vocab_size": VOCABULARY}
    inputs: dict[str, Tensor | Scalar] = {"logits": Tensor(["batch_size", "vocab_size"])}
    for name in form.numbers():
        dtype, sample = _NUMBERS[name]
        by_row = name in form.by_row
        inputs[name] = Tensor(rows, dtype=dtype) if by_row else Scalar(dtype, sample=sample)
    for name in form.masks:
        if name == "output_counts":
            inputs[name] = Tensor(["batch_size", "vocab_size"], dtype="int32")
        else:
            axes["mask_words"] = Const("", value="(vocab_size + 31) // 32")
            text = "A bit each token."
            inputs[name] = Tensor(["batch_size", "mask_words"], dtype="int32", description=text)
    return TraceTemplate(
        op_type="sampling",
        name_prefix=form.name(),
        description="Draws a token from logits by temperature, top-k, top-p and min-p"
        + (f", with {' and '.join(form.masks)}" if form.masks else ""),
        axes={**axes, **(SEED_AXES if form.seeds else {})},
        inputs={**inputs, **(SEEDS if form.seeds else {"seed": SEED, "offset": OFFSET})},
        outputs={"tokens": Tensor(rows, dtype="int32")},
        reference=reference,
        fixed={"filter_apply_order": "joint" if form.joint else "top_k_first"},
        fill=_fill,
    )


def _fill(made: dict[str, Any]) -> None:
    """Penalties and masks that change the tokens."""
    import torch

    fill(made)
    for name, value in made.items():
        if not isinstance(value, torch.Tensor):
            continue
        count = torch.arange(value.numel(), device=value.device)
        if name.endswith("_penalty"):
            made[name] = (count % 4 + 2) / 2
        elif name == "output_counts":
            made[name] = (count % 3).to(torch.int32).view(value.shape)
        elif name in ("prompt_mask", "bitmask"):
            made[name] = (count * 0x5BD1E995).to(torch.int32).view(value.shape)
