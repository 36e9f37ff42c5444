# SPDX-License-Identifier: Apache-2.0
"""Checks of merges in reference mode, with the errors of the bindings."""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.validation import (
    check_device_and_dtype,
    check_elements_apart,
    check_memory_apart,
    check_rank,
    check_same_device,
)


def _check_state(
    name: str,
    names: tuple[str, str],
    v: torch.Tensor,
    s: torch.Tensor,
    rank: int,
    like: tuple[str, torch.Tensor],
) -> None:
    """Raise unless ``v`` and ``s`` are a state of this rank with the dtype of ``like``."""
    like_name, first = like
    check_device_and_dtype(name, names[0], v, first, first.dtype, like_name)
    check_rank(name, names[0], v, rank, rank)
    check_device_and_dtype(name, names[1], s, first, torch.float32, like_name)
    if s.shape != v.shape[:-1]:
        raise ValueError(
            f"{name}: {names[1]} must have the shape of {names[0]} less its last dimension, got "
            f"{[*s.shape]} for {[*v.shape]}"
        )


def _check_dtype(name: str, argument: str, v: torch.Tensor) -> None:
    if v.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"{name}: {argument} must be float16, bfloat16 or float32, got {dtype_word(v.dtype)}"
        )


def _check_outputs(name: str, v: tuple[str, torch.Tensor], s: tuple[str, torch.Tensor]) -> None:
    check_elements_apart(name, *v)
    check_elements_apart(name, *s)
    check_memory_apart(name, *v, s[1], s[0])


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    same: bool = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return same


def check_pair(name: str, states: tuple[tuple[str, str, torch.Tensor, torch.Tensor], ...]) -> None:
    """Check states, of which the last is written and may be one of the others."""
    first = states[0][0], states[0][2]
    _check_dtype(name, *first)
    for v_name, s_name, v, s in states:
        _check_state(name, (v_name, s_name), v, s, 3, first)
        if v.shape != first[1].shape:
            raise ValueError(
                f"{name}: {v_name} must have {first[0]}'s shape {[*first[1].shape]}, got "
                f"{[*v.shape]}"
            )
    v_name, s_name, v, s = states[-1]
    _check_outputs(name, (v_name, v), (s_name, s))
    for other_v_name, other_s_name, other_v, other_s in states[:-1]:
        for mine_name, mine, other_name, other in (
            (v_name, v, other_v_name, other_v),
            (s_name, s, other_s_name, other_s),
        ):
            if _is_same(mine, other):
                continue
            try:
                check_memory_apart(name, mine_name, mine, other, other_name)
            except ValueError:
                raise ValueError(
                    f"{name}: {mine_name} must be {other_name} itself or not overlap its memory; "
                    f"call .clone()"
                ) from None
        check_memory_apart(name, v_name, v, other_s, other_s_name)
        check_memory_apart(name, s_name, s, other_v, other_v_name)


def check_mask(name: str, mask: torch.Tensor | None, v: torch.Tensor) -> None:
    """Raise unless a mask has one number for each token."""
    if mask is not None:
        check_same_device(name, "mask", mask, v, "v")
        if mask.dtype not in (torch.bool, torch.uint8):
            raise ValueError(f"{name}: mask must be bool or uint8, got {dtype_word(mask.dtype)}")
        if mask.shape != v.shape[:1]:
            raise ValueError(f"{name}: mask must have shape [{v.shape[0]}], got {[*mask.shape]}")


def check_states(
    v: torch.Tensor, s: torch.Tensor, v_merged: torch.Tensor, s_merged: torch.Tensor
) -> None:
    """Check any number of states, and what they become."""
    name = "merge_states"
    _check_dtype(name, "v", v)
    _check_state(name, ("v", "s"), v, s, 4, ("v", v))
    _check_state(name, ("v_merged", "s_merged"), v_merged, s_merged, 3, ("v", v))
    if v_merged.shape != (v.shape[0], *v.shape[2:]):
        raise ValueError(
            f"{name}: v_merged must have the shape of v less its states, got "
            f"{[*v_merged.shape]} for {[*v.shape]}"
        )
    _check_outputs(name, ("v_merged", v_merged), ("s_merged", s_merged))
    for out_name, out in (("v_merged", v_merged), ("s_merged", s_merged)):
        check_memory_apart(name, out_name, out, v, "v")
        check_memory_apart(name, out_name, out, s, "s")
