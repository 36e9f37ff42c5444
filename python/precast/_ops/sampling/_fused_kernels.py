# SPDX-License-Identifier: Apache-2.0
"""The two exports behind ``sample``: with all that a request may ask for, and for tokens alone."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export
from precast._ops.sampling._arguments import DERIVED, kinds, order_of
from precast._ops.sampling._fused_checks import check_sample
from precast._ops.sampling._fused_reference import sample_reference

_LOGITS = "logits:T temperature:temperature top_k:top_k top_p:top_p min_p:min_p joint:bool"
_PENALTIES = (
    "repetition_penalty:repetition_penalty frequency_penalty:frequency_penalty "
    "presence_penalty:presence_penalty"
)
_DERIVED = {
    **DERIVED,
    "filter_apply_order": order_of,
    "return_valid": lambda valid: valid is not None,
}


_PUBLIC = (
    *("temperature", "top_k", "top_p", "min_p", "filter_apply_order", "seed", "offset"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "prompt_mask"),
    *("output_counts", "bitmask", "top_logprobs"),
)


def _write(out: torch.Tensor, valid: torch.Tensor | None, **given: Any) -> None:
    arguments = {name: given[name] for name in _PUBLIC if name in given}
    results = sample_reference(given["logits"], **arguments)
    others = (given.get(name) for name in ("logprobs", "top_tokens", "top_token_logprobs"))
    for target, result in zip((out, *others, valid), results):
        if target is not None:
            target.copy_(result)


SAMPLE = Export(
    "sampling_fused",
    "sample",
    f"{_LOGITS} {_PENALTIES} prompt_mask?:tensor output_counts?:tensor bitmask?:tensor "
    "random:random out!:tensor logprobs!?:tensor top_tokens!?:tensor top_token_logprobs!?:tensor "
    "valid!?:tensor enable_pdl:pdl",
    check=check_sample,
    write=_write,
    derived={
        **_DERIVED,
        "return_logprobs": lambda logprobs: logprobs is not None,
        "top_logprobs": lambda top_tokens: (
            0 if top_tokens is None or not top_tokens.dim() else top_tokens.shape[1]
        ),
    },
    kinds=kinds("sample", "logits"),
)

# The kernel of `sampling`, to which nothing is added: the same tokens in less time.
SAMPLE_TOKENS = Export(
    "sampling",
    "sample_tokens",
    f"{_LOGITS} random:random out!:tensor valid!?:tensor enable_pdl:pdl",
    check=check_sample,
    write=_write,
    derived=_DERIVED,
    kinds=kinds("sample", "logits"),
    function="sample",
)
