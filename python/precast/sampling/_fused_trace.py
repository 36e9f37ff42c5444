# SPDX-License-Identifier: Apache-2.0
"""The trace templates of ``sample``: with numbers, and with all that a batch of requests has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast.sampling._trace import OFFSET, SEED, VOCABULARY, fill
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_PARAMETERS = {
    "temperature": ("float32", 0.75),
    "top_k": ("int32", 20),
    "top_p": ("float32", 0.75),
    "min_p": ("float32", 0.0625),
}
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def _fill(made: dict[str, Any]) -> None:
    import torch

    fill(made)
    rows = made["logits"].shape[0]
    for name in _PENALTIES:
        made[name] = (torch.arange(rows, device=made["logits"].device) % 4 + 2) / 2
    for name in ("prompt_mask", "bitmask"):
        words = torch.arange(made[name].numel(), device=made[name].device) * 0x5BD1E995
        made[name] = words.to(torch.int32).view(made[name].shape)
    counts = torch.arange(made["output_counts"].numel(), device=made["logits"].device)
    made["output_counts"] = (counts % 3).to(torch.int32).view(made["output_counts"].shape)


def sample_trace(reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """A dispatch function of the two forms."""
    rows, logits = ["batch_size"], Tensor(["batch_size", "vocab_size"])
    axes: dict[str, Var | Const] = {"batch_size": Var("Rows."), "vocab_size": VOCABULARY}
    numbers = TraceTemplate(
        op_type="sampling",
        name_prefix="sample",
        description="Draws a token from logits by temperature, top-k, top-p and min-p",
        axes=axes,
        inputs={
            "logits": logits,
            **{name: Scalar(dtype, sample=value) for name, (dtype, value) in _PARAMETERS.items()},
            "seed": SEED,
            "offset": OFFSET,
        },
        outputs={"tokens": Tensor(rows, dtype="int32")},
        reference=reference,
    )
    masks = Tensor(["batch_size", "mask_words"], dtype="int32", description="A bit each token.")
    requests = TraceTemplate(
        op_type="sampling",
        name_prefix="sample_requests",
        description="Draws tokens of requests with parameters, penalties and masks of their own",
        axes={**axes, "mask_words": Const("", value="(vocab_size + 31) // 32")},
        inputs={
            "logits": logits,
            **{name: Tensor(rows, dtype=dtype) for name, (dtype, _) in _PARAMETERS.items()},
            **{name: Tensor(rows, dtype="float32") for name in _PENALTIES},
            "prompt_mask": masks,
            "output_counts": Tensor(["batch_size", "vocab_size"], dtype="int32"),
            "bitmask": masks,
            "seed": SEED,
            "offset": OFFSET,
        },
        outputs={"tokens": Tensor(rows, dtype="int32")},
        reference=reference,
        fill=_fill,
    )

    @dispatch(numbers, requests)
    def choose(**call: Any) -> TraceTemplate:
        plain = all(call.get(name) is None for name in ("prompt_mask", "output_counts", "bitmask"))
        return numbers if plain and not hasattr(call.get("temperature"), "shape") else requests

    return choose
