# SPDX-License-Identifier: Apache-2.0
"""What the functions with quantisation share: fp8 values, new outputs, checks."""

from __future__ import annotations

from collections.abc import Mapping

from precast._base.dtypes import dtype_word
from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.validation import (
    check_device_and_dtype,
    check_dtype,
    check_elements_apart,
    check_indices,
    check_memory_apart,
    check_rank,
)
from precast._ops.rope._angles import cached_angles, rotated
from precast._ops.rope._checks import (
    MAX_HEAD_DIM,
    check_cache,
    check_first,
    check_like,
    check_tokens,
)

#: Queries and keys: the columns that are rotated, and those that are not.
PARTS = ("q_rope", "k_rope", "q_nope", "k_nope")


def quantized(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``x * scale`` in fp8: nearest even, beyond the largest number that number, NaN stays."""
    return saturated(x.float() * scale, dtype)


def turned_and_quantized(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``[tokens, heads, dim]`` or ``[tokens, dim]`` turned in all columns, in fp8."""
    heads = x.unsqueeze(1) if x.dim() == 2 else x
    turned = rotated(heads, cached_angles(positions, cos_sin_cache), not is_neox)
    return quantized(turned, scale, dtype).view(x.shape)


def without_columns(x: torch.Tensor) -> torch.Tensor:
    """What stands for a part that is None: the same heads, no columns."""
    return x[..., :0]


def fp8_type(export: str, dtype: torch.dtype | None, **outputs: torch.Tensor | None) -> torch.dtype:
    """The fp8 type asked for, or that of the first output, or e4m3; all outputs must have it."""
    given = "quantize_dtype"
    for name, out in outputs.items():
        if out is None:
            continue
        if dtype is None:
            given, dtype = name, out.dtype
        elif out.dtype != dtype:
            check_fp8(export, dtype, given)
            check_dtype(export, name, out, dtype)
    if dtype is None:
        return torch.float8_e4m3fn
    check_fp8(export, dtype, given)
    return dtype


def new_output(out: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(like, dtype=dtype) if out is None else out


def new_outputs(
    export: str,
    dtype: torch.dtype | None,
    **pairs: tuple[torch.Tensor | None, torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The outputs that a caller gave, and new ones in fp8 that are like their inputs."""
    dtype = fp8_type(export, dtype, **{name: out for name, (out, _) in pairs.items()})
    return tuple(new_output(out, like, dtype) for out, like in pairs.values())


def check_fp8(export: str, dtype: torch.dtype, name: str) -> None:
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        got = dtype_word(dtype)
        raise ValueError(f"{export}: {name} must be float8_e4m3fn or float8_e5m2, got {got}")


def check_parts(
    export: str,
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    key_ranks: tuple[int, int],
) -> None:
    """Queries and keys in their two parts, the cache and the positions."""
    check_first(export, "q_rope", q_rope)
    check_rank(export, "k_rope", k_rope, *key_ranks)
    names = {"q_rope": q_rope, "q_nope": q_nope, "k_rope": k_rope, "k_nope": k_nope}
    for name, x in names.items():
        check_like(export, name, x, "q_rope", q_rope)
        rank = 3 if name.startswith("q") else k_rope.dim()
        check_rank(export, name, x, rank, rank)
    for part in ("q", "k"):
        rope, nope = names[f"{part}_rope"], names[f"{part}_nope"]
        check_tokens(export, f"{part}_nope", nope, f"{part}_rope", rope)
        if rope.dim() == 3 and nope.shape[1] != rope.shape[1]:
            raise ValueError(
                f"{export}: {part}_nope must have {rope.shape[1]} heads as {part}_rope, got "
                f"{nope.shape[1]}"
            )
    check_tokens(export, "k_rope", k_rope, "q_rope", q_rope)
    check_cache(export, cos_sin_cache, "q_rope", q_rope)
    rotary_dim = cos_sin_cache.shape[1]
    if not 2 <= rotary_dim <= MAX_HEAD_DIM or rotary_dim % 2:
        raise ValueError(
            f"{export}: rotary_dim must be even, from 2 to the head size {MAX_HEAD_DIM}, got "
            f"{rotary_dim}"
        )
    for name, x in (("q_rope", q_rope), ("k_rope", k_rope)):
        if x.shape[-1] != rotary_dim:
            raise ValueError(
                f"{export}: {name}'s last dimension must be cos_sin_cache's {rotary_dim}, got "
                f"{x.shape[-1]}"
            )
    check_indices(export, "pos_ids", pos_ids, q_rope.shape[0], q_rope, "q_rope")


def check_outputs(
    export: str, outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> None:
    """Each output is like its input in fp8, and apart from all other tensors of tokens."""
    dtype = outputs["q_rope_out"].dtype
    check_fp8(export, dtype, "q_rope_out")
    for name, out in outputs.items():
        input_name = name.removesuffix("_out")
        check_device_and_dtype(export, name, out, inputs[input_name], dtype, input_name)
        if out.shape != inputs[input_name].shape:
            raise ValueError(
                f"{export}: {name} must have {input_name}'s shape "
                f"{[*inputs[input_name].shape]}, got {[*out.shape]}"
            )
        check_elements_apart(export, name, out)
        for other_name, other in {**inputs, **outputs}.items():
            if other is not out:
                check_memory_apart(export, name, out, other, other_name)
