# SPDX-License-Identifier: Apache-2.0
"""What functions of top-k refuse in reference mode, as the kernels do."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.validation import check_dtype, check_rank, check_same_device

MOST_COLUMNS, MOST_CHOSEN = 1 << 20, 8192


def check_scores(export: str, input: torch.Tensor, k: int, tie_break: int) -> None:
    """What all functions refuse."""
    check_dtype(export, "input", input, torch.float32, torch.float16, torch.bfloat16)
    check_rank(export, "input", input, 2, 2)
    if input.shape[1] > MOST_COLUMNS:
        raise ValueError(
            f"{export}: input must have at most {MOST_COLUMNS} columns, got shape {[*input.shape]}"
        )
    if k < 1:
        raise ValueError(f"{export}: k must be at least 1, got {k}")
    if k > MOST_CHOSEN:
        raise ValueError(f"{export}: k must be at most {MOST_CHOSEN}, got {k}")
    if tie_break not in (0, 1, 2):
        raise ValueError(f"{export}: tie_break must be 0, 1 or 2, got {tie_break}")


def check_rows(
    export: str,
    input: torch.Tensor,
    k: int,
    tie_break: int,
    rows: dict[str, torch.Tensor | None],
    outs: dict[str, torch.Tensor | None],
) -> None:
    """That, and tensors with an int32 for each row, or results that do not fit."""
    check_scores(export, input, k, tie_break)
    shapes = {**dict.fromkeys(rows, input.shape[:1]), **dict.fromkeys(outs, (input.shape[0], k))}
    for name, tensor in {**rows, **outs}.items():
        if tensor is None:
            continue
        check_same_device(export, name, tensor, input)
        check_dtype(export, name, tensor, torch.int32)
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"{export}: {name} must have shape {[*shapes[name]]}, got {[*tensor.shape]}"
            )
