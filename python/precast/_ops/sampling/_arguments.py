# SPDX-License-Identifier: Apache-2.0
"""The arguments of exports that draw tokens, made from those of public functions, and checked."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, TypeAlias

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.dispatch import check_tensors
from precast._op.validation import (
    check_dtype,
    check_elements_apart,
    check_memory_apart,
    check_rank,
    check_same_device,
    check_within,
)
from precast._ops.sampling._random import random_arguments

#: A number for all rows, or a tensor with one for each.
Whole: TypeAlias = "torch.Tensor | int"
Real: TypeAlias = "torch.Tensor | float"

MOST_TOKENS = 1 << 20  # of a vocabulary


def whole(value: Whole) -> tuple[torch.Tensor | None, int]:
    """As the exports take it: an int32 tensor or none, and a number."""
    if type(value) is not int and isinstance(value, torch.Tensor):
        return (value if value.dtype == torch.int32 else value.to(torch.int32)), 0
    return None, value


def real(value: Real) -> tuple[torch.Tensor | None, float]:
    """As the exports take it: a float32 tensor or none, and a number."""
    if type(value) is not float and isinstance(value, torch.Tensor):
        return (value if value.dtype == torch.float32 else value.float()), 0.0
    return None, value


def heat(function: str, temperature: Real) -> tuple[torch.Tensor | None, float]:
    """:func:`real` of a temperature. A number is checked; a tensor would have to be waited for."""
    number: Any = temperature
    if type(number) is not float:
        if isinstance(number, torch.Tensor):
            return real(number)
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            kind = type(number).__name__
            raise TypeError(f"{function}: temperature must be a number or a tensor, got {kind}")
    if not number >= 0:  # NaN, too
        raise ValueError(f"{function}: temperature must be 0 or more, got {number}")
    return None, number + 0.0  # -0.0 is 0.0


def given(tensor: torch.Tensor | None, number: Any) -> Any:
    """The one of the two that a caller gave."""
    return number if tensor is None else tensor


def is_joint(function: str, filter_apply_order: str) -> bool:
    """Whether both filters look at the whole distribution."""
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(
            f"{function}: Invalid filter_apply_order: {filter_apply_order!r}; it must be "
            f"'top_k_first' or 'joint'"
        )
    return filter_apply_order == "joint"


def refuse_nan(x: torch.Tensor, kind: str) -> None:
    """Wait for the GPU, and raise if there is a NaN."""
    if bool(torch.isnan(x).any()):
        raise ValueError(f"Input {kind} contains NaN.")


def draw_arguments(
    function: str,
    kind: str,
    x: torch.Tensor,
    indices: torch.Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: Whole | None,
    offset: Whole | None,
    return_valid: bool = False,
    top_k: Whole = 0,
    top_p: Real = 1.0,
    min_p: Real = 0.0,
    joint: bool = False,
    temperature: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    """Everything that ``sample_from_probs`` or ``sample_from_logits`` takes, results included."""
    try:
        if check_nan:
            refuse_nan(x, kind)
        if indices is None:
            outputs, dtype = x.shape[0], torch.int32
        else:
            outputs, dtype = indices.shape[0], indices.dtype
        return (
            x,
            indices,
            *whole(top_k),
            *real(top_p),
            *real(min_p),
            *temperature,
            joint,
            *random_arguments(function, x, generator, seed, offset),
            torch.empty(outputs, dtype=dtype, device=x.device),
            torch.empty(outputs, dtype=torch.bool, device=x.device) if return_valid else None,
            True,
        )
    except (AttributeError, TypeError, IndexError):
        named = {kind: x} if indices is None else {kind: x, "indices": indices}
        check_tensors(function, **named)
        check_rank(function, kind, x, 2, 2)
        if indices is not None:
            check_rank(function, "indices", indices, 1, 1)
        raise


# -- what the references of exports refuse --------------------------------------------------------


def check_distributions(export: str, name: str, x: torch.Tensor) -> None:
    """Two dimensions of a legal size and element type."""
    check_dtype(export, name, x, torch.float32, torch.float16, torch.bfloat16)
    check_rank(export, name, x, 2, 2)
    check_vocabulary(export, name, x)


def check_vocabulary(export: str, name: str, x: torch.Tensor) -> None:
    """The last dimension is no longer than the kernels' rows."""
    size = x.shape[-1]
    if not 1 <= size <= MOST_TOKENS:
        raise ValueError(
            f"{export}: {name} must have 1 to {MOST_TOKENS} columns, got shape {[*x.shape]}"
        )


def check_by_row(
    export: str, x: torch.Tensor, x_name: str, parameters: Mapping[str, torch.Tensor | None]
) -> None:
    """Each parameter that is a tensor has a number for each row of ``x``."""
    for name, values in parameters.items():
        if values is None:
            continue
        check_same_device(export, name, values, x, x_name)
        dtype = torch.int32 if name == "top_k" else torch.float32
        check_dtype(export, name, values, dtype)
        if values.dim() == 0:
            raise ValueError(
                f"{export}: {name}: Expected a 1D tensor of shape (batch_size,) or scalar, got a "
                f"0-dimensional tensor"
            )
        if values.dim() > 1:
            raise ValueError(
                f"{export}: {name}: Expected a 1D tensor or scalar, got a {values.dim()}D tensor"
            )
        if values.shape != x.shape[:1]:
            raise ValueError(
                f"{export}: Sampling parameter tensor batch size mismatch: {name} must have shape "
                f"{[*x.shape[:1]]}, got {[*values.shape]}"
            )


def check_random(
    export: str,
    x: torch.Tensor,
    x_name: str,
    outputs: int,
    seed_arr: torch.Tensor | None,
    offset_arr: torch.Tensor | None,
) -> None:
    """Seeds and offsets that are tensors have one number or one for each output."""
    for name, values in (("seed", seed_arr), ("offset", offset_arr)):
        if values is None:
            continue
        if values.device != x.device:
            raise ValueError(
                f"{export}: {name} tensor must be on {x.device} as {x_name}, got {values.device}"
            )
        if values.dtype not in (torch.int64, torch.uint64):
            raise ValueError(
                f"{export}: {name} tensor must be int64/uint64, got {dtype_word(values.dtype)}"
            )
        if values.dim() != 1:
            raise ValueError(f"{export}: {name} tensor must be 1D, got shape {[*values.shape]}")
        if values.shape[0] not in (1, outputs):
            raise ValueError(
                f"{export}: {name} tensor length must be 1 or {outputs}, got {values.shape[0]}"
            )


def check_outputs(
    export: str,
    x: torch.Tensor,
    x_name: str,
    indices: torch.Tensor | None,
    out: torch.Tensor,
    valid: torch.Tensor | None,
) -> int:
    """Indices and results fit each other; the number of outputs."""
    outputs: int = x.shape[0]
    if indices is not None:
        check_same_device(export, "indices", indices, x, x_name)
        check_dtype(export, "indices", indices, torch.int32, torch.int64)
        check_rank(export, "indices", indices, 1, 1)
        if indices.shape[0] > 0 and outputs == 0:
            raise ValueError(
                f"{export}: {x_name} must have the rows that indices name, got shape {[*x.shape]}"
            )
        check_within(export, "indices", indices, outputs, f"rows of {x_name}")
        outputs = indices.shape[0]
    dtype = torch.int32 if indices is None else indices.dtype
    for name, result, kind in (("out", out, dtype), ("valid", valid, torch.bool)):
        if result is None:
            continue
        check_same_device(export, name, result, x, x_name)
        check_dtype(export, name, result, kind)
        if result.shape != (outputs,):
            raise ValueError(f"{export}: {name} must have shape [{outputs}], got {[*result.shape]}")
    return outputs


def check_result(export: str, name: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` is like ``x`` and may be it."""
    check_same_device(export, "out", out, x, name)
    if out.shape != x.shape:
        raise ValueError(f"{export}: out must have {name}'s shape {[*x.shape]}, got {[*out.shape]}")
    check_elements_apart(export, "out", out)
    if out.data_ptr() != x.data_ptr() or out.stride() != x.stride():
        check_memory_apart(export, "out", out, x, name)
