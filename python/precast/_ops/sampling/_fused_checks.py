# SPDX-License-Identifier: Apache-2.0
"""What the reference of ``sample`` refuses before it writes."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.validation import check_dtype, check_same_device
from precast._ops.sampling._arguments import check_by_row, check_distributions, check_random

MOST_TOP_LOGPROBS = 32


def check_sample(logits: torch.Tensor, **given: Any) -> None:
    """Raise ValueError for an argument of ``sample`` that the kernels do not take."""
    check_distributions("sample", "logits", logits)
    rows, size = logits.shape
    filters = ("temperature", "top_k", "top_p", "min_p")
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    by_row = {name: given[name] for name in (*filters, *penalties) if name in given}
    check_by_row("sample", logits, "logits", by_row)
    words = -(-size // 32)
    top = given.get("top_tokens")
    columns = 0 if top is None else top.shape[-1]
    for name, shape, dtype in (
        ("prompt_mask", (rows, words), torch.int32),
        ("output_counts", (rows, size), torch.int32),
        ("bitmask", (rows, words), torch.int32),
        ("out", (rows,), torch.int32),
        ("logprobs", (rows,), torch.float32),
        ("top_tokens", (rows, columns), torch.int32),
        ("top_token_logprobs", (rows, columns), torch.float32),
        ("valid", (rows,), torch.bool),
    ):
        tensor = given.get(name)
        if tensor is None:
            continue
        check_same_device("sample", name, tensor, logits, "logits")
        check_dtype("sample", name, tensor, dtype)
        if tensor.shape != shape:
            raise ValueError(f"sample: {name} must have shape {[*shape]}, got {[*tensor.shape]}")
    if columns > MOST_TOP_LOGPROBS:
        raise ValueError(
            f"sample: top_tokens must have at most {MOST_TOP_LOGPROBS} columns, got {columns}"
        )
    random = given["random"]
    check_random("sample", logits, "logits", rows, random[0], random[2])
