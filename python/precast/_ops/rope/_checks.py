# SPDX-License-Identifier: Apache-2.0
"""Validate calls of RoPE in reference mode, as the bindings do."""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.validation import (
    check_dtype,
    check_elements_apart,
    check_memory_apart,
    check_rank,
)

VECTOR = 8
MAX_HEAD_DIM = 512


def check_first(export: str, name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless there are modules for the dtype; references take float32, too."""
    check_dtype(export, name, x, torch.float16, torch.bfloat16, torch.float32)


def check_pair(
    export: str, names: Sequence[str], q: torch.Tensor, k: torch.Tensor, rotary_dim: int
) -> None:
    """Raise ValueError unless queries and keys fit each other; in place, they share no memory."""
    dim = q.shape[-1]
    if dim % VECTOR or dim > MAX_HEAD_DIM:
        raise ValueError(
            f"{export}: {names[0]}'s head size must be a multiple of {VECTOR} up to "
            f"{MAX_HEAD_DIM}, got {dim}"
        )
    if k.shape[-1] != dim:
        raise ValueError(
            f"{export}: {names[1]} must have {names[0]}'s head size {dim}, got {k.shape[-1]}"
        )
    check_tokens(export, names[1], k, names[0], q)
    if not 2 <= rotary_dim <= dim or rotary_dim % 2:
        raise ValueError(
            f"{export}: rotary_dim must be even, from 2 to the head size {dim}, got {rotary_dim}"
        )
    if not export.endswith("_inplace"):
        return
    for name, x in zip(names, (q, k)):
        check_elements_apart(export, name, x)
    check_memory_apart(export, names[1], k, q, names[0])


def check_tokens(
    export: str, name: str, x: torch.Tensor, other_name: str, other: torch.Tensor
) -> None:
    if x.shape[0] != other.shape[0]:
        raise ValueError(
            f"{export}: {name} must have {other.shape[0]} tokens as {other_name}, got {x.shape[0]}"
        )


def check_cache(export: str, cache: torch.Tensor) -> None:
    if cache.dtype != torch.float32:
        got = dtype_word(cache.dtype)
        raise ValueError(f"{export}: cos_sin_cache should be float32, got {got}")
    check_rank(export, "cos_sin_cache", cache, 2, 2)
