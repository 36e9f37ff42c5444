# SPDX-License-Identifier: Apache-2.0
"""Validate calls of RoPE in reference mode, as the bindings do."""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.validation import (
    check_dtype,
    check_indices,
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
    """Raise ValueError unless queries and keys fit each other."""
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


def check_computed(
    export: str,
    q: torch.Tensor,
    k: torch.Tensor,
    rotary_dim: int,
    rope_scale: float,
    rope_theta: float,
    indptr: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    low_freq_factor: float = 0.0,
    high_freq_factor: float = 1.0,
    old_context_len: int = 1,
) -> None:
    """Check what declarations do not say of the functions that compute frequencies."""
    if old_context_len <= 0:
        raise ValueError(f"{export}: old_context_len must be positive, got {old_context_len}")
    check_first(export, "q", q)
    check_pair(export, ("q", "k"), q, k, rotary_dim)
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if not value > 0:
            raise ValueError(f"{export}: {name} must be positive, got {value:g}")
    if not high_freq_factor > low_freq_factor:
        raise ValueError(
            f"{export}: high_freq_factor must exceed low_freq_factor {low_freq_factor:g}, got "
            f"{high_freq_factor:g}"
        )
    if indptr is not None and offsets is not None:
        if indptr.dim() != 1 or indptr.shape[0] < 1:
            raise ValueError(
                f"{export}: indptr must have shape [requests + 1], got {[*indptr.shape]}"
            )
        check_indices(export, "indptr", indptr, indptr.shape[0], q, "q")
        check_indices(export, "offsets", offsets, indptr.shape[0] - 1, q, "q")
