# SPDX-License-Identifier: Apache-2.0
"""Wrong values for every argument of every public function: rejected by name, nothing is written.

:mod:`wrong_values` tells what is legal from what is wrong.
"""

from __future__ import annotations

import fractions
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from wrong_values import bits, copies, wrong_values

import precast
from precast import trace
from precast._base.public_name import public_name
from precast._op.dispatch import kernels
from precast.trace import registered


def functions() -> dict[str, tuple[Callable[..., Any], Any]]:
    """The public functions by name, each with one of its templates, which make sound calls."""
    found = {}
    for function, template in registered():
        name = public_name(function)
        is_method = name.split(".")[-2][:1].isupper()
        if name.startswith("precast.") and not is_method:
            found.setdefault(name, (function, template))
    return found


@functools.lru_cache(maxsize=1)
def names() -> list[str]:
    return sorted(functions())


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


def test_exports_get_what_callers_say_of_pdl(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is on; what is no bool reaches the export, which refuses it."""
    got: list[object] = []
    monkeypatch.setattr(
        type(kernels()["scale"]),
        "__missing__",
        lambda self, key: lambda *args: got.append(args[-1]),
    )
    for value in (None, True, False, 0, "x"):
        precast.scale(torch.ones(2), 2.0, enable_pdl=value)  # type: ignore[arg-type]
    assert got == [True, True, False, 0, "x"]
