# SPDX-License-Identifier: Apache-2.0
"""Make the arguments of exports from those of public functions, and check them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.ranges import INT64, MOST_FLOAT, NOT_NAN, Range
from precast._op.validation import check_dtype, check_rank, check_same_device
from precast._ops.sampling._random import random_arguments

#: A number for all rows, or a tensor with one for each.
Whole: TypeAlias = "torch.Tensor | int"
Real: TypeAlias = "torch.Tensor | float"

MAX_VOCAB_SIZE = 1 << 20
FILTERS = ("top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
#: What may be a number for all rows, or a tensor with one for each.
NUMBERS = ("temperature", *FILTERS, *PENALTIES)


def int_arguments(value: Whole) -> tuple[torch.Tensor | None, int]:
    """Return what the exports take: an int32 tensor or None, and a number."""
    if type(value) is not int and isinstance(value, torch.Tensor):
        return (value if value.dtype == torch.int32 else value.to(torch.int32)), 0
    return None, value


def float_arguments(value: Real) -> tuple[torch.Tensor | None, float]:
    """Return what the exports take: a float32 tensor or None, and a number."""
    if type(value) is not float and isinstance(value, torch.Tensor):
        return (value if value.dtype == torch.float32 else value.float()), 0.0
    return None, value


def temperature_arguments(function: str, temperature: Real) -> tuple[torch.Tensor | None, float]:
    """Return :func:`float_arguments` of a temperature, which must not be negative.

    Only a number is checked: for the values of a tensor, the call would have to wait.
    """
    number: Any = temperature
    if type(number) is not float:
        if isinstance(number, torch.Tensor):
            return float_arguments(number)
        if isinstance(number, bool):
            raise TypeError(f"{function}: temperature must be a torch.Tensor or a number, got bool")
    if not number >= 0:  # NaN, too
        raise ValueError(f"{function}: temperature must be 0 or more, got {number}")
    return None, number + 0.0  # -0.0 is 0.0


def given(tensor: torch.Tensor | None, number: Any) -> Any:
    """Return the one of the two that a caller gave."""
    return number if tensor is None else tensor


def given_float(tensor: torch.Tensor | None, number: Any) -> Any:
    """Return the one of the two that a caller gave; the export makes a number a float32."""
    if tensor is not None:
        return tensor
    return math.copysign(math.inf, number) if abs(number) > MOST_FLOAT else float(number)


def is_joint(function: str, filter_apply_order: str) -> bool:
    """Return whether each filter applies to the whole distribution."""
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(
            f"{function}: Invalid filter_apply_order: {filter_apply_order!r}; it must be "
            f"'top_k_first' or 'joint'"
        )
    return filter_apply_order == "joint"


def reject_nan(x: torch.Tensor, kind: str) -> None:
    """Wait for the GPU, and raise if there is a NaN."""
    if bool(torch.isnan(x).any()):
        raise ValueError(f"Input {kind} contains NaN.")


def explain_draw(export: str, **given: Any) -> None:
    """Raise ValueError for a tensor whose rank makes a draw fail in Python."""
    for name, rank in (("probs", 2), ("logits", 2), ("indices", 1)):
        if given.get(name) is not None:
            check_rank(export, name, given[name], rank, rank)


# -- kinds of arguments ---------------------------------------------------------------------------


def _number(name: str, type_word: str, source: str, legal: Range | None = None) -> Kind:
    """Declare a number for all rows or a tensor with one for each: two arguments of an export."""
    encoders = (int_arguments, float_arguments, temperature_arguments)
    names = {f"_{encoder.__name__}": encoder for encoder in encoders}
    decode = given_float if type_word == "float" else given
    return Kind(f"Tensor? {name}_arr, {type_word} {name}", source, decode, names, legal)


def kinds(function: str, x: str) -> dict[str, Kind]:
    """Return the kinds of arguments of functions of rows ``x``; ``no_top_k`` is a constant.

    ``random`` is a tuple of generator, seed and offset; ``own_random`` are the function's arguments
    of these names, where :func:`launches` makes its body. Both come after what can be rejected,
    because a call that fails must not advance a generator.
    """
    reals = ("top_p", "min_p", "repetition", "frequency", "presence")
    random = Kind(
        "Tensor? seed_arr, SymInt seed, Tensor? offset_arr, SymInt offset",
        f"*_random_arguments({function!r}, {x}, *{{name}})",
        lambda *random: random,
        {"_random_arguments": random_arguments},
    )
    own_source = f"*_random_arguments({function!r}, {x}, generator, seed, offset)"
    order_source = f"_is_joint({function!r}, {{name}})"
    temperature = f"*_temperature_arguments({function!r}, 1.0 if {{name}} is None else {{name}})"
    return {
        "top_k": _number("top_k", "SymInt", "*_int_arguments({name})", INT64),
        **{name: _number(name, "float", "*_float_arguments({name})", NOT_NAN) for name in reals},
        "temperature": _number("temperature", "float", temperature),
        "no_top_k": _number("top_k", "SymInt", "None, 0"),
        "no_top_p": _number("top_p", "float", "None, 1.0"),
        "no_min_p": _number("min_p", "float", "None, 0.0"),
        "no_temperature": _number("temperature", "float", "None, 1.0"),
        "order": Kind("bool joint", order_source, _order_of, {"_is_joint": is_joint}),
        "no_order": Kind("bool joint", "False", _order_of),
        "random": random,
        "own_random": random._replace(encode=own_source),
    }


#: These functions find public arguments again from what an export gets.
DERIVED: dict[str, Callable[..., Any]] = {
    "seed": lambda random: given(random[0], random[1]),
    "offset": lambda random: given(random[2], random[3]),
    "return_valid": lambda valid: valid is not None,
}


def _order_of(joint: bool) -> str:
    """Return the public argument ``filter_apply_order``."""
    return "joint" if joint else "top_k_first"


# -- checks of references -------------------------------------------------------------------------


def check_rows(export: str, **given: Any) -> None:
    """Check what a declaration of rows does not say: their size, numbers by row, seeds."""
    x_name = "probs" if "probs" in given else "logits"
    x = given[x_name]
    check_vocabulary(export, x_name, x)
    for name in NUMBERS:
        values = given.get(name)
        if not isinstance(values, torch.Tensor):
            continue
        check_same_device(export, name, values, x, x_name)
        check_dtype(export, name, values, torch.int32 if name == "top_k" else torch.float32)
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
    if "random" in given:
        check_random(export, x_name, x, given["random"], len(given["out"]))


def check_vocabulary(export: str, name: str, x: torch.Tensor) -> None:
    """Check that the last dimension is not longer than the kernels' rows."""
    size = x.shape[-1]
    if not 1 <= size <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"{export}: {name} must have 1 to {MAX_VOCAB_SIZE} columns, got shape {[*x.shape]}"
        )


def check_random(
    export: str, x_name: str, x: torch.Tensor, random: tuple[Any, ...], outputs: int
) -> None:
    """Check that seeds and offsets that are tensors have one number or one for each output."""
    for name, values in (("seed", random[0]), ("offset", random[2])):
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
