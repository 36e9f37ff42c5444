# SPDX-License-Identifier: Apache-2.0
"""The arguments of exports that draw tokens, made from those of public functions, and checked."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.declaration import Kind
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


def draw_outputs(
    x: torch.Tensor, indices: torch.Tensor | None, return_valid: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """New tokens of a draw, and whether each row is a distribution, if that is asked for."""
    rows = x if indices is None else indices
    dtype = torch.int32 if indices is None else indices.dtype
    valid = torch.empty(rows.shape[0], dtype=torch.bool, device=x.device) if return_valid else None
    return torch.empty(rows.shape[0], dtype=dtype, device=x.device), valid


def explain_draw(
    export: str,
    probs: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
) -> None:
    """Raise ValueError for a tensor whose rank makes a draw fail in Python."""
    for name, x, rank in (("probs", probs, 2), ("logits", logits, 2), ("indices", indices, 1)):
        if x is not None:
            check_rank(export, name, x, rank, rank)


# -- kinds of arguments ---------------------------------------------------------------------------


def _number(name: str, type_word: str, encode: Callable[..., Any]) -> Kind:
    """A number for all rows, or a tensor with one for each: two arguments of an export."""
    return Kind(
        f"Tensor? {name}_arr, {type_word} {name}",
        f"*_{encode.__name__}({{name}})",
        given,
        {f"_{encode.__name__}": encode},
    )


def _constant(name: str, type_word: str, value: float) -> Kind:
    """The same for a function that has no such argument."""
    return Kind(f"Tensor? {name}_arr, {type_word} {name}", f"None, {value!r}", given)


def kinds(function: str, x: str) -> dict[str, Kind]:
    """The kinds of arguments of functions of rows ``x``; ``no_top_k`` and the like are constants.

    ``random`` is a tuple of generator, seed and offset. It comes after what can be refused, because
    a call that fails must not advance a generator.
    """
    heat_source = f"*_heat({function!r}, 1.0 if {{name}} is None else {{name}})"
    return {
        "top_k": _number("top_k", "SymInt", whole),
        "top_p": _number("top_p", "float", real),
        "min_p": _number("min_p", "float", real),
        "repetition_penalty": _number("repetition", "float", real),
        "frequency_penalty": _number("frequency", "float", real),
        "presence_penalty": _number("presence", "float", real),
        "temperature": Kind(
            "Tensor? temperature_arr, float temperature", heat_source, given, {"_heat": heat}
        ),
        "no_top_k": _constant("top_k", "SymInt", 0),
        "no_top_p": _constant("top_p", "float", 1.0),
        "no_min_p": _constant("min_p", "float", 0.0),
        "no_temperature": _constant("temperature", "float", 1.0),
        "not_joint": Kind("bool joint", "False"),
        "random": Kind(
            "Tensor? seed_arr, SymInt seed, Tensor? offset_arr, SymInt offset",
            f"*_random_arguments({function!r}, {x}, *{{name}})",
            lambda *random: random,
            {"_random_arguments": random_arguments},
        ),
    }


#: Public arguments that are found again from what an export gets.
DERIVED: dict[str, Callable[..., Any]] = {
    "seed": lambda random: given(random[0], random[1]),
    "offset": lambda random: given(random[2], random[3]),
}


def order_of(joint: bool) -> str:
    """The public argument ``filter_apply_order``."""
    return "joint" if joint else "top_k_first"


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
    export: str, x: torch.Tensor, x_name: str, parameters: Mapping[str, object]
) -> None:
    """Each parameter that is a tensor has a number for each row of ``x``."""
    for name, values in parameters.items():
        if not isinstance(values, torch.Tensor):
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
