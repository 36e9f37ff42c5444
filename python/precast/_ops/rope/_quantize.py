# SPDX-License-Identifier: Apache-2.0
"""Quantise, make outputs and validate for the functions that quantise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast._base.dtypes import dtype_word
from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.validation import (
    check_device_and_dtype,
    check_dtype,
    check_elements_apart,
    check_memory_apart,
    check_rank,
)
from precast._ops.rope._checks import MAX_HEAD_DIM, check_cache, check_first, check_tokens

#: Queries and keys: the columns that are rotated, and those that are not.
PARTS = ("q_rope", "k_rope", "q_nope", "k_nope")

# Why an assignment: a new output needs the slice, too, and a slice costs more than all Python here.
_NOPE = {
    f"{x}_nope": f"(({x}_nope := {x}_rope[..., :0]) if {x}_nope is None else {x}_nope)"
    for x in "qk"
}

#: A part that is None reaches the module as the same heads without columns.
KINDS = {
    name: Kind("Tensor {name}", source.replace(name, "{name}")) for name, source in _NOPE.items()
}


def first_output(
    export: str,
    quantize_dtype: torch.dtype | None,
    q_rope: torch.Tensor,
    q_rope_out: torch.Tensor | None,
    k_rope_out: torch.Tensor | None,
    q_nope_out: torch.Tensor | None,
    k_nope_out: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``q_rope_out``, or a new one of the fp8 type that all outputs must have.

    That is ``quantize_dtype``, or the type of the first output that is given, or e4m3.
    """
    source, dtype = "quantize_dtype", quantize_dtype
    for part, out in zip(PARTS, (q_rope_out, k_rope_out, q_nope_out, k_nope_out)):
        if out is None:
            continue
        if dtype is None:
            source, dtype = f"{part}_out", out.dtype
        elif out.dtype != dtype:
            check_fp8(export, dtype, source)
            check_dtype(export, f"{part}_out", out, dtype)
    dtype = torch.float8_e4m3fn if dtype is None else dtype
    check_fp8(export, dtype, source)
    return torch.empty_like(q_rope, dtype=dtype) if q_rope_out is None else q_rope_out


#: New outputs; the first one determines the dtype of the others.
NEW: dict[str, str | Callable[..., torch.Tensor]] = {
    "q_rope_out": first_output,
    **{
        f"{name}_out": f"_torch.empty_like({_NOPE.get(name, name)}, dtype=q_rope_out.dtype)"
        for name in PARTS[1:]
    },
}


# -- references -----------------------------------------------------------------------------------


def quantized(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x * scale`` in fp8: nearest even, saturated, NaN stays."""
    return saturated(x.float() * scale, dtype)


# -- validation -----------------------------------------------------------------------------------


def check_fp8(export: str, dtype: torch.dtype, name: str) -> None:
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        got = dtype_word(dtype)
        raise ValueError(f"{export}: {name} must be float8_e4m3fn or float8_e5m2, got {got}")


def check_parts(export: str, given: Mapping[str, Any], key_ranks: tuple[int, int]) -> None:
    """Raise ValueError unless queries, keys, values if there are any, and outputs fit."""
    inputs = {name: given[name] for name in (*PARTS, "v") if name in given}
    q_rope, k_rope, rank = given["q_rope"], given["k_rope"], given["k_rope"].dim()
    check_first(export, "q_rope", q_rope)
    check_rank(export, "k_rope", k_rope, *key_ranks)
    for name, x in inputs.items():
        check_device_and_dtype(export, name, x, q_rope, q_rope.dtype, "q_rope")
        wanted = 3 if name.startswith("q") else rank
        check_rank(export, name, x, wanted, wanted)
    for part in ("q", "k"):
        rope, nope = inputs[f"{part}_rope"], inputs[f"{part}_nope"]
        check_tokens(export, f"{part}_nope", nope, f"{part}_rope", rope)
        if rope.dim() == 3 and nope.shape[1] != rope.shape[1]:
            raise ValueError(
                f"{export}: {part}_nope must have {rope.shape[1]} heads as {part}_rope, got "
                f"{nope.shape[1]}"
            )
    check_tokens(export, "k_rope", k_rope, "q_rope", q_rope)
    check_cache(export, given["cos_sin_cache"])
    rotary_dim = given["cos_sin_cache"].shape[1]
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
    if "v" in inputs:
        check_tokens(export, "v", inputs["v"], "k_rope", k_rope)
    _check_outputs(export, {key: given[key] for key in given if key.endswith("_out")}, inputs)


def _check_outputs(
    export: str, outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> None:
    """Raise ValueError unless outputs are like inputs in fp8 and share no memory."""
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
