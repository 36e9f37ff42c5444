# SPDX-License-Identifier: Apache-2.0
"""An export's outputs that callers leave out, and public arguments that it does not get."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import precast._op.dispatch
from precast._op.export import Export, launches


def _output_of(x: torch.Tensor, dtype: torch.dtype | None, out: torch.Tensor | None, export: str):
    if out is None:
        return torch.empty_like(x, dtype=dtype)
    if dtype not in (None, out.dtype):
        raise ValueError(f"{export}: dtype must be that of out")
    return out


def _reference(x: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    return x.to(dtype), x.sum().reshape(1)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, reference_mode: None):
    monkeypatch.setattr(precast._op.dispatch, "KERNELS", {})
    export = Export(
        "scale",
        "cast_and_sum",
        "x:T[*size] out!:like(x,U,apart) total!:f32[.] scratch!:f32 enable_pdl:pdl_on",
        reference=_reference,
        new={
            "out": _output_of,
            "total": "x.new_empty((), dtype=_torch.float32)",
            "scratch": "x.new_empty(4, dtype=_torch.float32)",
        },
        derived={"dtype": lambda out: out.dtype},
    )

    @launches(export, returns=("out", "total"))
    def cast_and_sum(
        x: torch.Tensor, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """No body."""

    cast_and_sum.export = export
    return cast_and_sum


def test_outputs_are_made_and_returned_but_scratch(double) -> None:
    x = torch.tensor([1.0, 2.0])
    out, total = double(x, torch.float16)
    assert out.dtype is torch.float16 and out.tolist() == [1.0, 2.0]
    assert total.shape == () and total.item() == 3.0  # The reference gave it the shape [1].


def test_a_function_that_takes_its_output_sees_the_one_that_was_given(double) -> None:
    x, given = torch.tensor([1.0, 2.0]), torch.empty(2, dtype=torch.bfloat16)
    assert double(x, out=given)[0] is given
    with pytest.raises(ValueError, match=r"^cast_and_sum: dtype must be that of out"):
        double(x, torch.float16, given)


def test_an_output_that_callers_must_give_is_checked_before_the_kernel_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, reference_mode: None
) -> None:
    monkeypatch.setattr(precast._op.dispatch, "KERNELS", {})
    export = Export("scale", "cast", "x:T out!:U", reference=lambda x: x, new={"out": _output_of})

    @launches(export)
    def cast(x: torch.Tensor, out: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """No body."""

    x, out = torch.ones(2), torch.zeros(2, dtype=torch.bfloat16)
    cast(x, out)
    assert out.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"^cast: dtype must be that of out"):
        cast(x, out, torch.float16)


def test_public_arguments_that_the_export_does_not_get_are_found_again(double) -> None:
    x, out = torch.ones(2), torch.empty(2, dtype=torch.bfloat16)
    public = double.export.public_arguments((x, out, torch.ones(()), torch.ones(4), True))
    assert public is not None and public["dtype"] is torch.bfloat16


def test_an_output_is_named_after_the_tensor_that_it_must_be_like(double) -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"out must have x's shape \[2, 2\], got \[2\]"):
        double(x, out=torch.ones(2))
    with pytest.raises(ValueError, match="out must not overlap x's memory"):
        double(x, out=x)


def test_a_constant_is_no_public_argument(double) -> None:
    export = double.export
    assert export.launch.__code__.co_varnames[: export.launch.__code__.co_argcount] == (
        "x",
        "out",
        "total",
        "scratch",
    )
    passed = []
    export[torch.float32, torch.float32, -1] = lambda *args: passed.append(args)
    double(torch.ones(1))
    assert passed[0][-1] is True


@pytest.fixture
def row_sum(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(precast._op.dispatch, "KERNELS", {})
    calls: list[tuple[object, ...]] = []
    export = Export(
        "scale",
        "sum_of_row",
        "x:T[n] out!:T[1]",
        key="x.shape[-1], x.get_device()",
        around=lambda *args: calls.append(args),
        reference=lambda x: x.sum().reshape(1),
        derived={"x": lambda x: x.unsqueeze(0)},
        error_name="row_sum",
    )
    export.calls = calls
    return export


def test_sizes_may_be_axes_of_the_module(row_sum) -> None:
    x = torch.ones(3)
    assert row_sum.key(x, x) == (torch.float32, 3, -1)


def test_what_runs_around_the_function_takes_it_first(row_sum, monkeypatch) -> None:
    loader = SimpleNamespace(axis_names=lambda op: ("dtype", "n"), load=lambda *module: module)
    monkeypatch.setattr("precast._runtime.loader.loader", loader)
    monkeypatch.setattr("precast._runtime.library.get_function", lambda module, name: name)
    row_sum[torch.float32, 3, 0](1, 2)
    assert row_sum.calls == [("sum_of_row", 1, 2)]


def test_callers_may_give_a_declared_argument_in_another_form(row_sum, reference_mode) -> None:
    x, out = torch.ones(3), torch.zeros(1)
    row_sum.call(x, out)  # The reference gets what the export gets.
    assert out.item() == 3
    assert row_sum.public_arguments((x, out))["x"].shape == (1, 3)
    with pytest.raises(ValueError, match=r"^row_sum: out must have shape \[1\], got \[2\]"):
        row_sum.call(x, torch.zeros(2))
