# SPDX-License-Identifier: Apache-2.0
"""What RoPE refuses in reference mode before it writes: what the bindings refuse."""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.validation import (
    check_device_and_dtype,
    check_dtype,
    check_elements_apart,
    check_indices,
    check_memory_apart,
    check_rank,
    check_same_device,
)

VECTOR = 8
MAX_HEAD_DIM = 512


def check_first(export: str, name: str, x: torch.Tensor) -> None:
    """Of a type for which there are modules; references take float32, too, to be read."""
    check_dtype(export, name, x, torch.float16, torch.bfloat16, torch.float32)


def check_like(
    export: str, name: str, x: torch.Tensor, first_name: str, first: torch.Tensor
) -> None:
    """Device and dtype of the first tensor."""
    check_device_and_dtype(export, name, x, first, first.dtype, first_name)


def as_heads(export: str, name: str, x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """``[tokens, heads, dim]`` of it, or of ``[tokens, heads * dim]``; a view."""
    check_rank(export, name, x, 2, 3)
    if x.dim() == 3:
        return x
    if head_dim <= 0 or x.shape[-1] % head_dim:
        raise ValueError(
            f"{export}: {name}'s last dimension must be a multiple of the head size {head_dim}, "
            f"got shape {[*x.shape]}"
        )
    return x.unflatten(-1, (-1, head_dim)) if x.shape[-1] else x.unflatten(-1, (0, head_dim))


def check_pair(
    export: str, names: Sequence[str], q: torch.Tensor, k: torch.Tensor, rotary_dim: int
) -> None:
    """Queries and keys as heads: one head size, one number of tokens; in place, apart in memory."""
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


def check_requests(
    export: str, indptr: torch.Tensor, offsets: torch.Tensor, first: torch.Tensor
) -> None:
    if indptr.dim() != 1 or indptr.shape[0] < 1:
        raise ValueError(f"{export}: indptr must have shape [requests + 1], got {[*indptr.shape]}")
    check_indices(export, "indptr", indptr, indptr.shape[0], first, "q")
    check_indices(export, "offsets", offsets, indptr.shape[0] - 1, first, "q")


def check_cache(export: str, cache: torch.Tensor, first_name: str, first: torch.Tensor) -> None:
    check_same_device(export, "cos_sin_cache", cache, first, first_name)
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
    llama31: tuple[float, float, int] | None = None,
) -> None:
    """Everything but positions of the functions that compute angles."""
    if llama31 is not None and llama31[2] <= 0:
        raise ValueError(f"{export}: old_context_len must be positive, got {llama31[2]}")
    check_first(export, "q", q)
    check_like(export, "k", k, "q", q)
    check_rank(export, "q", q, 3, 3)
    check_rank(export, "k", k, 3, 3)
    check_pair(export, ("q", "k"), q, k, rotary_dim)
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if not value > 0:
            raise ValueError(f"{export}: {name} must be positive, got {value:g}")
    if llama31 is not None and not llama31[1] > llama31[0]:
        raise ValueError(
            f"{export}: high_freq_factor must exceed low_freq_factor {llama31[0]:g}, got "
            f"{llama31[1]:g}"
        )
