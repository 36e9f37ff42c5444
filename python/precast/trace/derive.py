# SPDX-License-Identifier: Apache-2.0
"""The trace template of an op whose declaration says all that a template needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast._op.declaration import Leading, Parameter, TensorKind
from precast._op.export import Export
from precast.trace.fields import Const, Scalar, Tensor, Var
from precast.trace.template import TraceTemplate

_SCALARS = {"float": "float32", "int": "int32", "SymInt": "int32", "bool": "bool"}


def template_of(
    export: Export,
    op_type: str,
    description: str,
    reference: Callable[..., Any],
    *,
    axes: Mapping[str, Var | Const] | None = None,
    names: Mapping[str, str] | None = None,
) -> TraceTemplate:
    """A template with the tensors and numbers of the declaration, in its order.

    Parameters
    ----------
    export : Export
        Its sizes are the axes; one that is like another tensor has the axes of that.
    op_type, description, reference
        As :class:`TraceTemplate` takes them.
    axes : mapping, optional
        Which sizes belong to the model and which to the call. Default: leading dimensions are
        :class:`Var`, others :class:`Const`.
    names : mapping of str to str, optional
        The names of tensors in the definition, by argument. Default: the arguments; ``output`` for
        ``out``.
    """
    called = {"out": "output", **(names or {})}
    found: dict[str, Var | Const] = {}
    inputs: dict[str, Tensor | Scalar] = {}
    outputs: dict[str, Tensor] = {}
    shapes: dict[str, list[str]] = {}
    first = export.declaration.first
    for parameter in export.declaration.parameters:
        name = called.get(parameter.name, parameter.name)
        if not isinstance(parameter.kind, TensorKind):
            word = parameter.schema.split()[0]
            if parameter.source == parameter.name:  # What is passed in another form has none.
                inputs[name] = Scalar(_SCALARS[word], param=parameter.name)
            continue
        shape = shapes[parameter.name] = _shape(parameter, shapes)
        for axis in shape:
            found.setdefault(axis, Var() if axis.startswith("*") else Const())
        if parameter.written:
            outputs[name] = Tensor(
                shape, dtype_from=called.get(first.name, first.name), param=parameter.name
            )
        else:
            inputs[name] = Tensor(shape, param=parameter.name)
    return TraceTemplate(
        op_type=op_type,
        name_prefix=export.function,
        description=description,
        axes={**found, **(axes or {})},
        inputs=inputs,
        outputs=outputs,
        reference=reference,
    )


def _shape(parameter: Parameter, shapes: Mapping[str, list[str]]) -> list[str]:
    kind = parameter.kind
    assert isinstance(kind, TensorKind)
    if kind.like:
        return shapes[kind.like]
    assert kind.dims is not None
    return [f"*{dim.name}" if isinstance(dim, Leading) else dim for dim in kind.dims]
