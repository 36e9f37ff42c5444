# SPDX-License-Identifier: Apache-2.0
"""Check by names alone whether a template fits its function."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from precast.trace.fields import DTYPES, Const, Scalar, Var
from precast.trace.template import TraceTemplate


def problems(function: Callable[..., Any], template: TraceTemplate) -> Iterator[str]:
    """A text for each disagreement."""
    parameters = inspect.signature(function).parameters
    yield from _parameters(parameters.values(), template)
    yield from _axes(set(parameters), template)
    yield from _dtypes(template)
    yield from _reference(template)
    yield from _constraints(template)
    for name in template.outputs.keys() & template.inputs.keys():
        yield f"{name!r} is both an input and an output"


def _parameters(parameters: Iterable[inspect.Parameter], template: TraceTemplate) -> Iterator[str]:
    by_name = {parameter.name: parameter for parameter in parameters}
    there = f"the parameters are {', '.join(by_name)}"
    for name, param in template.input_params().items():
        if param.partition(".")[0] not in by_name:
            yield f"input {name!r} reads parameter {param!r}; {there}"
    for name, spec in template.outputs.items():
        if spec.param is not None and spec.param not in by_name:
            yield f"output {name!r} is written to parameter {spec.param!r}; {there}"
    for name in template.fixed.keys() - by_name.keys():
        yield f"parameter {name!r} is fixed; {there}"
    params = {param.partition(".")[0] for param in template.input_params().values()}
    read = params | {*template.fixed}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in by_name.items():
        if parameter.kind in several:
            continue
        if parameter.default is parameter.empty and name not in read:
            yield (
                f"parameter {name!r} has no default, and no input reads it; the inputs read "
                f"{', '.join(sorted(read))}"
            )


def _axes(parameters: set[str], template: TraceTemplate) -> Iterator[str]:
    there = f"the axes are {', '.join(template.axes)}"
    read: set[str] = set()
    for kind, specs in (("input", template.inputs), ("output", template.outputs)):
        for name, spec in specs.items():
            if isinstance(spec, Scalar):
                continue
            for axis in spec.axes:
                if axis not in template.axes:
                    yield f"{kind} {name!r} has axis {axis!r}; {there}"
            if sum(axis.startswith("*") for axis in spec.axes) > 1:
                yield f"{kind} {name!r} has several starred axes: {', '.join(spec.axes)}"
            if kind == "input":
                read |= set(spec.axes)
    scalars = {name for name, spec in template.inputs.items() if isinstance(spec, Scalar)}
    seen = {axis.lstrip("*") for axis in read}
    for axis, what in template.axes.items():
        if isinstance(what, Const) and axis.startswith("*"):
            yield f"axis {axis!r} is constant; only a Var may be starred"
        if axis in read:
            continue
        if isinstance(what, Var):
            if what.in_data:
                continue
            yield f"axis {axis!r} is in no input tensor; their axes are {', '.join(sorted(read))}"
        elif what.value is not None:
            unknown = sorted(_names(what.value) - seen - scalars)
            if unknown:
                yield (
                    f"axis {axis!r} is {what.value!r}, which names {', '.join(unknown)}; the axes "
                    f"read before it are {', '.join(sorted(seen))}"
                )
        elif (what.param or axis) not in parameters:
            yield (
                f"constant axis {axis!r} is in no input tensor (their axes are "
                f"{', '.join(sorted(read))}), and {(what.param or axis)!r} is no parameter: they "
                f"are {', '.join(sorted(parameters))}"
            )
        seen.add(axis)


def _dtypes(template: TraceTemplate) -> Iterator[str]:
    legal = f"the schema has {', '.join(DTYPES.values())}"
    for name, spec in {**template.inputs, **template.outputs}.items():
        if spec.dtype is not None and spec.dtype not in DTYPES.values():
            yield f"{name!r} has dtype {spec.dtype!r}; {legal}"
    for name, output in template.outputs.items():
        if (output.dtype is None) == (output.dtype_from is None):
            yield f"output {name!r} needs either dtype or dtype_from"
        if output.dtype_from is not None and output.dtype_from not in template.inputs:
            yield (
                f"output {name!r} has the dtype of {output.dtype_from!r}; the inputs are "
                f"{', '.join(template.inputs)}"
            )


def _reference(template: TraceTemplate) -> Iterator[str]:
    parameters = inspect.signature(template.reference).parameters
    there = f"the parameters of {template.reference.__name__} are {', '.join(parameters)}"
    given = {**template.reference_params(), **{name: name for name in template.of_reference}}
    for name, param in given.items():
        if param not in parameters:
            yield f"input {name!r} is passed to the reference as {param!r}; {there}"
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in given.values():
            yield (
                f"no input gives the reference its {name!r}; the inputs read "
                f"{', '.join(given.values())}"
            )


def _constraints(template: TraceTemplate) -> Iterator[str]:
    known = {*(axis.lstrip("*") for axis in template.axes), *template.inputs}
    for constraint in template.constraints:
        try:
            unknown = sorted(_names(constraint) - known)
        except SyntaxError:
            yield f"constraint {constraint!r} is no Python expression"
            continue
        if unknown:
            yield (
                f"constraint {constraint!r} names {', '.join(unknown)}; the axes are "
                f"{', '.join(template.axes)}"
            )


def _names(expression: str) -> set[str]:
    tree = ast.parse(expression, mode="eval")
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
