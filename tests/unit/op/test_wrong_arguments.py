# SPDX-License-Identifier: Apache-2.0
"""Wrong values for every argument of every public function: rejected by name, nothing is written.

What is legal is told apart from what is wrong by the annotation of an argument, and by the tables
below; each wrong value is one that no call can mean.
"""

from __future__ import annotations

import fractions
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import precast
from precast import trace
from precast._base.public_name import public_name
from precast._op.dispatch import kernels
from precast.trace import registered

HUGE = 2**70
#: Values that are of no type of an argument but those that are named.
OTHERS: dict[str, tuple[Any, ...]] = {
    "torch.Tensor": (object(), "x", [1.0], b"x", 1j, {}),
    "torch.dtype": (object(), "x", [1.0], 1.5, HUGE, 1j),
    "torch.Generator": (object(), "x", [1.0], 1.5, HUGE),
    "float": (object(), "x", b"x", [1.0], 1j, (), {}, HUGE, -HUGE),
    "int": (object(), "x", b"x", [1.0], 1j, 1.5, math.nan, math.inf, HUGE, -HUGE),
    "bool": (object(), "x", b"x", [1.0], 1j, 1.5, math.nan, HUGE, torch.ones(2)),
    "str": (object(), "x", b"x", [1.0], 1.5, HUGE, {}, ()),
    "Cache": (object(), "x", [1.0], 1.5, HUGE, {}, ()),
}
ALIASES = {
    "Scale": ("torch.Tensor", "float", "None"),
    "Whole": ("torch.Tensor", "int"),
    "Real": ("torch.Tensor", "float"),
    "SfLayout": ("int",),
    "tuple[torch.Tensor, torch.Tensor]": ("Cache",),
}
#: Numbers out of range, by argument.
RANGES: dict[str, tuple[Any, ...]] = {
    "eps": (math.nan, -1.0, -1e-30, math.inf, 1e39),
    "top_k": (2**63,),
    "top_p": (math.nan,),
    "min_p": (math.nan,),
    "temperature": (math.nan, -1.0, True),
    "repetition_penalty": (math.nan,),
    "frequency_penalty": (math.nan,),
    "presence_penalty": (math.nan,),
    "weight_bias": (math.nan,),
    "rope_scale": (math.nan, 0.0, -1.0),
    "rope_theta": (math.nan, 0.0, -1.0),
    "old_context_len": (0, -1),
    "nnz": (-1, 2**31),
    "tile_rows": (0, -1),
    "tile_columns": (0, -1),
    "group_size": (0, -1, 100),
    "sfLayout": (-1, 7),
    "tie_break": (-1, 7),
    "page_size": (0, -1),
    "k": (0, -1),
    "num_q_heads": (-1,),
    "top_logprobs": (-1,),
}


def functions() -> dict[str, tuple[Callable[..., Any], Any]]:
    """The public functions by name, each with one of its templates, which make sound calls."""
    found = {}
    for function, template in registered():
        name = public_name(function)
        if name.startswith("precast.") and "Wrapper" not in name:
            found.setdefault(name, (function, template))
    return found


@functools.lru_cache(maxsize=1)
def names() -> list[str]:
    return sorted(functions())


def members(annotation: object) -> set[str]:
    words = str(annotation).split(" | ")
    return {part for word in words for part in ALIASES.get(word, (word,))}


def wrong_values(parameter: inspect.Parameter) -> list[Any]:
    """What no call can mean by this argument."""
    types = members(parameter.annotation)
    tables = [OTHERS[word] for word in types if word in OTHERS]
    values = [value for table in tables for value in table]
    shared = [v for v in values if all(any(v is w for w in table) for table in tables)]
    if "torch.Tensor" in types and len(types - {"None"}) == 1:
        shared += [1.5, HUGE, math.nan]
    if "None" not in types and not types & {"bool", "Any", "object"}:
        shared.append(None)
    if "torch.Tensor" not in types or "float" in types or "int" in types:
        shared += RANGES.get(parameter.name, ())
    return shared


def copies(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in call.items() if isinstance(v, torch.Tensor)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A NaN is equal to itself, and float8 can be compared."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", names())
def test_wrong_arguments_are_rejected_by_name(name: str, reference_mode: None) -> None:
    function, template = functions()[name]
    sound = trace.make_inputs(function, template, seed=1)
    before = copies(sound)
    tried = 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "skip_check" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        for wrong in wrong_values(parameter):
            tried += 1
            said = f"{name}({parameter.name}={wrong!r})"
            try:
                function(**{**sound, parameter.name: wrong})
            except Exception as error:
                plain = type(error) in (TypeError, ValueError, NotImplementedError)
                assert plain or type(error).__module__.startswith("precast."), said
                assert parameter.name in str(error), f"{said} does not name it: {error}"
            else:
                pytest.fail(f"{said} was accepted")
    assert tried
    after = copies(sound)
    for key, tensor in before.items():
        assert torch.equal(bits(tensor), bits(after[key])), f"{name}: {key} has changed"


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("quantization.mxfp8_quantize", "input"),
        ("quantization.nvfp4_quantize", "a"),
        ("quantization.fp4_quantize", "input"),
        ("quantization.mxfp4_dequantize", "a_fp4"),
        ("quantization.silu_and_mul_per_token_group_quant", "input"),
        ("rope.apply_rope", "q"),
    ],
)
def test_a_tensor_without_dimensions_is_named(
    name: str, argument: str, reference_mode: None
) -> None:
    function, template = functions()[f"precast.{name}"]
    call = trace.make_inputs(function, template, seed=1)
    words = rf"{argument} must have at least \d dimensions?, got shape \[\]"
    with pytest.raises(ValueError, match=words):
        function(**{**call, argument: call[argument].new_empty(())})


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.int64(1), True, 1, fractions.Fraction(1, 2)]
)
def test_numbers_that_exports_take_are_taken(number: Any, reference_mode: None) -> None:
    x = torch.randn(2, 32)
    weight = torch.ones(32)
    assert torch.equal(
        precast.rmsnorm(x, weight, number), precast.rmsnorm(x, weight, float(number))
    )


def test_what_is_wrong_is_said_after_a_call_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Any, key: object) -> Callable[..., None]:
        def export(*args: object) -> None:
            raise TypeError("Mismatched type on argument #2")

        return export

    monkeypatch.setattr(type(kernels()["rmsnorm"]), "__missing__", missing)
    x, weight = torch.randn(2, 32), torch.ones(32)
    with pytest.raises(TypeError, match=r"^rmsnorm: eps must be a number, got str 'x'$"):
        precast.rmsnorm(x, weight, "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Mismatched type on argument #2$"):
        precast.rmsnorm(x, weight, 1e-6)


def test_rows_are_not_allocated_before_their_number_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = torch.tensor([0, 1])
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("allocated"))
    for nnz in (-1, 2**31):
        with pytest.raises(ValueError, match=f"nnz must be from 0 to 2147483647, got {nnz}$"):
            precast.get_batch_indices_positions(ends, ends[1:], nnz)


def test_the_variable_may_be_set_after_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECAST_REFERENCE", "1")
    precast.scale(torch.ones(2), 2.0)
    with pytest.raises(TypeError, match="enable_pdl must be a bool, got str 'x'"):
        precast.scale(torch.ones(2), 2.0, enable_pdl="x")  # type: ignore[arg-type]
    monkeypatch.delenv("PRECAST_REFERENCE")
    with precast.reference_mode():
        precast.scale(torch.ones(2), 2.0)


def test_one_scale_of_two_dimensions_is_one_number(reference_mode: None) -> None:
    x = torch.randn(8, dtype=torch.bfloat16)
    scale = torch.tensor(0.5)
    wanted = precast.static_quant_fp8(x, scale)
    assert torch.equal(bits(precast.static_quant_fp8(x, scale.view(1, 1))), bits(wanted))


@pytest.mark.parametrize("column_major", [True, False])
def test_a_hidden_size_of_zero(column_major: bool, reference_mode: None) -> None:
    rows = torch.empty(3, 0, dtype=torch.bfloat16)
    scales = torch.empty(0, 4) if column_major else torch.empty(3, 0)
    codes = torch.empty(3, 0, dtype=torch.float8_e4m3fn)
    arguments = codes, scales, None, rows, rows.clone(), rows[0]
    done = precast.fused_add_rmsnorm_fp8_block_quant(*arguments, column_major_scales=column_major)
    assert done is None
