# SPDX-License-Identifier: Apache-2.0
"""The limits of top-k, and what its exports have in common."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.validation import check_dtype, check_rank

MOST_COLUMNS, MOST_CHOSEN = 1 << 20, 8192

#: An enum reaches an export as its number.
KINDS = {"enum": Kind("int {name}", "int({name})")}


def check_scores(export: str, input: torch.Tensor, k: int, tie_break: int) -> None:
    """Raise ValueError for scores, a number or a mode that no function of top-k takes."""
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


def new_indices(input: torch.Tensor, k: int) -> torch.Tensor:
    """``[rows, k]``, int32."""
    return torch.empty((input.shape[0], k), dtype=torch.int32, device=input.device)
