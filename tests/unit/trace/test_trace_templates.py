# SPDX-License-Identifier: Apache-2.0
"""Templates that are wrong say which key is, and templates of other people's functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from trace_support import definition_model, run_of

from precast import trace
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, registry
from precast.trace.registry import find

_SCALE = 0.5


def _halved(x: torch.Tensor) -> torch.Tensor:
    return x * _SCALE


def take_reference(table: torch.Tensor, rows: torch.Tensor, top: int, power: float) -> torch.Tensor:
    """A reference that uses a helper, a constant and a module."""
    return _halved(table)[rows.long()][:, :top] * math.pow(2.0, power)


def take(
    table: torch.Tensor, rows: torch.Tensor, top: int, power: float, out: object = None
) -> torch.Tensor:
    """A function of a caller of the library."""
    return take_reference(table, rows, top, power)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_traced", dict(registry._traced))


def template(**changes: Any) -> TraceTemplate:
    fields: dict[str, Any] = {
        "op_type": "take",
        "name_prefix": "take",
        "description": "Some rows of a table.",
        "axes": {
            "num_rows": Var("As many as are asked for."),
            "table_rows": Const("t"),
            "width": Const(),
            "top": Const("k", "Columns kept."),
        },
        "inputs": {
            "table": Tensor(["table_rows", "width"], description="What is taken from."),
            "rows": Tensor(["num_rows"], dtype="int32"),
            "top": Scalar("int32"),
            "exponent": Scalar("float32", param="power"),
        },
        "outputs": {"output": Tensor(["num_rows", "top"], dtype_from="table")},
        "reference": take_reference,
        "tags": ["stage:decode"],
        "constraints": ["top <= width"],
    }
    return TraceTemplate(**{**fields, **changes})


def test_a_constant_axis_read_off_a_parameter() -> None:
    good = template()
    assert trace.check_template(take, good) == []
    trace.register(take, good)
    call = trace.make_inputs(take, good, {"top": 4, "num_rows": 3})
    assert call["rows"].tolist() == [0, 0, 0]
    call["power"] = 2.0
    definition = trace.fi_trace(take, **call)
    definition_model().Definition.model_validate(definition)
    assert definition["name"] == "take_t80_width96_k4"
    assert definition["tags"] == [f"fi_api:{__name__}.take", "stage:decode"]
    assert definition["constraints"] == ["top <= width"]
    assert definition["axes"]["num_rows"] == {
        "type": "var",
        "description": "As many as are asked for.",
    }
    assert definition["axes"]["top"] == {
        "type": "const",
        "value": 4,
        "description": "Columns kept.",
    }
    assert definition["inputs"]["exponent"] == {"shape": None, "dtype": "float32"}
    assert "\n_SCALE = 0.5\n" in definition["reference"]
    run = run_of(definition)
    assert torch.equal(run(call["table"], call["rows"], 4, 2.0), take(**call))


def test_a_size_that_no_parameter_gives() -> None:
    trace.register(take, template(axes={**template().axes, "top": Const("k", param="out")}))
    x, rows = torch.ones(2, 4), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="no tensor has the axis 'top', and parameter 'out' gives"):
        trace.fi_trace(take, x, rows, 2, 1.0)


INPUTS, OUTPUTS, AXES = template().inputs, template().outputs, template().axes
PARAMETERS = "the parameters are table, rows, top, power, out"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"inputs": {**INPUTS, "rows": Tensor(["num_rows"], param="row")}},
            f"input 'rows' reads parameter 'row'; {PARAMETERS}",
        ),
        (
            {"outputs": {"output": Tensor(["num_rows", "top"], "result", dtype_from="table")}},
            f"output 'output' is written to parameter 'result'; {PARAMETERS}",
        ),
        (
            {"inputs": {k: v for k, v in INPUTS.items() if k != "exponent"}},
            "parameter 'power' has no default, and no input reads it; the inputs read "
            "rows, table, top",
        ),
        (
            {"axes": {**AXES, "heads": Const("h")}},
            "constant axis 'heads' is in no input tensor (their axes are num_rows, table_rows, "
            "width), and 'heads' is no parameter: they are out, power, rows, table, top",
        ),
        (
            {"axes": {**AXES, "top": Const("k", value="breadth // 2")}},
            "axis 'top' is 'breadth // 2', which names breadth; the axes read before it are "
            "num_rows, table_rows, width",
        ),
        (
            {"axes": {**AXES, "batch": Var()}},
            "axis 'batch' is in no input tensor; their axes are num_rows, table_rows, width",
        ),
        (
            {"inputs": {**INPUTS, "table": Tensor(["rows", "width"])}},
            "input 'table' has axis 'rows'; the axes are num_rows, table_rows, width, top",
        ),
        (
            {"outputs": {"output": Tensor(["num_row", "top"], dtype_from="table")}},
            "output 'output' has axis 'num_row'; the axes are num_rows, table_rows, width, top",
        ),
        (
            {"outputs": {"output": Tensor(["num_rows", "top"], dtype_from="tables")}},
            "output 'output' has the dtype of 'tables'; the inputs are table, rows, top, exponent",
        ),
        (
            {"outputs": {"output": Tensor(["num_rows", "top"])}},
            "output 'output' needs either dtype or dtype_from",
        ),
        (
            {"outputs": {"output": Tensor(["num_rows", "top"], dtype="bf16")}},
            "'output' has dtype 'bf16'; the schema has float32, float16, bfloat16",
        ),
        (
            {"outputs": {"table": Tensor(["num_rows", "top"], dtype_from="table")}},
            "'table' is both an input and an output",
        ),
        (
            {"reference": _halved},
            "input 'table' is passed to the reference as 'table'; the parameters of _halved are x",
        ),
        (
            {"reference": _halved},
            "no input gives the reference its 'x'; the inputs read table, rows, top, power",
        ),
        (
            {"constraints": ["top <= with_"]},
            "constraint 'top <= with_' names with_; the axes are num_rows, table_rows, width, top",
        ),
        ({"constraints": ["top <="]}, "constraint 'top <=' is no Python expression"),
        (
            {"axes": {**AXES, "*more": Const()}, "inputs": {**INPUTS, "m": Tensor(["*more"])}},
            "axis '*more' is constant; only a Var may be starred",
        ),
        (
            {"inputs": {**INPUTS, "table": Tensor(["*num_rows", "*width"])}},
            "input 'table' has several starred axes: *num_rows, *width",
        ),
    ],
)
def test_a_wrong_key_is_named_with_the_names_there(changes: dict[str, Any], words: str) -> None:
    problems = trace.check_template(take, template(**changes))
    place = f"{__name__}.take: <TraceTemplate take>: "
    assert all(problem.startswith(place) for problem in problems)
    assert any(words in problem for problem in problems), problems


def test_an_input_that_the_call_does_not_have() -> None:
    trace.register(take, template(inputs={**INPUTS, "rows": Tensor(["num_rows"], param="row")}))
    words = "input 'rows' reads parameter 'row', which the call does not have; it has table, rows"
    with pytest.raises(ValueError, match=words):
        trace.fi_trace(take, torch.ones(2, 4), torch.zeros(1, dtype=torch.int32), 2, 1.0)


WIDE, NARROW = template(name_prefix="take_wide"), template(name_prefix="take_narrow")


@trace.dispatch(WIDE, NARROW)
def _by_top(top: int, **others: Any) -> TraceTemplate:
    assert set(others) == {"table", "rows", "power", "out"}
    if top == 0:
        return template(name_prefix="take_none")
    return NARROW if top < 4 else WIDE


def test_a_dispatch_function_chooses_by_keyword() -> None:
    traced = precast_api(trace=_by_top)(take)
    pairs = [t for function, t in trace.registered() if function is take]
    assert pairs == [WIDE, NARROW]
    arguments = (torch.ones(2, 8), torch.zeros(1, dtype=torch.int32))
    fi_trace: Any = traced.fi_trace  # type: ignore[attr-defined]
    assert fi_trace(*arguments, 3, 1.0)["name"].startswith("take_narrow_")
    assert fi_trace(*arguments, top=5, power=1.0)["name"].startswith("take_wide_")
    with pytest.raises(
        ValueError,
        match=r"chose <TraceTemplate take_none>, which it does not list "
        r"in .templates: <TraceTemplate take_wide>, <TraceTemplate take_narrow>",
    ):
        fi_trace(*arguments, 0, 1.0)


def test_what_is_neither_template_nor_dispatch_function() -> None:
    with pytest.raises(TypeError, match="trace must be a TraceTemplate, or a function that lists"):
        trace.register(take, lambda **call: template())
    with pytest.raises(TypeError, match="trace must be a TraceTemplate"):
        precast_api(trace="take")(take)  # type: ignore[arg-type]


def test_the_last_registration_of_a_function_counts() -> None:
    first, second = template(), template(name_prefix="again")
    trace.register(take, first)
    trace.register(take, second)
    assert find(take).templates == (second,)


UNWRITABLE = torch.ones(1)
lambda_reference = lambda table, rows, top, power: table  # noqa: E731


def _uses_a_tensor(table: Any, rows: Any, top: int, power: float) -> Any:
    return table * UNWRITABLE


def _uses_nothing_there(table: Any, rows: Any, top: int, power: float) -> Any:
    return no_such_name(table)  # type: ignore[name-defined]  # noqa: F821


def _uses_precast(table: Any, rows: Any, top: int, power: float) -> Any:
    return trace.fi_trace(table)


def _recursive(table: Any, rows: Any, top: int, power: float) -> Any:
    return [_recursive(table, rows, t, power) for t in range(top)] and table


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (lambda_reference, "a reference must be a plain function of a module"),
        (_uses_a_tensor, "_uses_a_tensor: it uses 'UNWRITABLE', a Tensor; a reference may use"),
        (_uses_precast, "_uses_precast: 'trace' is a module of precast"),
        (_uses_nothing_there, "_uses_nothing_there: its module has no 'no_such_name'"),
    ],
)
def test_a_reference_that_cannot_stand_alone(reference: Any, words: str) -> None:
    trace.register(take, template(reference=reference))
    with pytest.raises(TypeError, match=words):
        trace.fi_trace(take, torch.ones(2, 4), torch.zeros(1, dtype=torch.int32), 2, 1.0)


def test_a_reference_that_calls_itself() -> None:
    trace.register(take, template(reference=_recursive))
    call = (torch.ones(2, 4), torch.zeros(1, dtype=torch.int32), 2, 1.0)
    assert torch.equal(run_of(trace.fi_trace(take, *call))(*call), call[0])
