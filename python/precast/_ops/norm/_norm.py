# SPDX-License-Identifier: Apache-2.0
"""Make the norms: the export of each, and its traces for rows of a hidden size and for heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from precast._op.declaration import TensorKind
from precast._op.decorators import CheckedOp, reference_of
from precast._op.export import Export, launches
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

P = ParamSpec("P")
R = TypeVar("R")

_AXES: dict[int, dict[str, Var | Const]] = {
    2: {"batch_size": Var("Rows: tokens of all requests."), "hidden_size": Const("h")},
    3: {
        "batch_size": Var("Tokens of all requests."),
        "num_heads": Const("n"),
        "head_dim": Const("d"),
    },
}


def norm(
    op: str,
    declaration: str,
    description: str,
    *,
    op_type: str = "rmsnorm",
    out_description: str = "",
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    choose: Callable[..., str] = lambda **others: "",
    explain: Callable[..., None] | None = None,
    **options: Any,
) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Make a public op of a function without a body; its reference is the function of its name.

    Parameters
    ----------
    op, declaration, **options
        As :class:`Export` takes them.
    explain
        As :func:`launches` takes it.
    description, op_type
        As :class:`TraceTemplate` takes them.
    out_description : str
        The description of ``out`` as an input, where the op reads its dtype.
    variants : mapping of str to mapping
        Further arguments of :func:`_template` by the suffix of the name. Default: one variant.
    choose : callable
        Takes the arguments of a call, without ``input``, and returns the suffix of its variant.
    """

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        reference = reference_of(function)
        export = Export(op, function.__name__, declaration, reference=reference, **options)
        templates = {
            (rank, suffix): _template(
                export, description, reference, op_type, rank, suffix, out_description, **others
            )
            for rank in _AXES
            for suffix, others in (variants or {"": {}}).items()
        }

        @dispatch(*templates.values())
        def by_rank(input: Any, **others: Any) -> TraceTemplate:
            return templates[3 if getattr(input, "ndim", 2) == 3 else 2, choose(**others)]

        return precast_api(trace=by_rank)(launches(export, explain=explain)(function))

    return decorate


def _template(
    export: Export,
    description: str,
    reference: Callable[..., Any],
    op_type: str,
    rank: int,
    suffix: str,
    out_description: str,
    out_dtype: str | None = None,
    left_out: Collection[str] = (),
) -> TraceTemplate:
    """Make a template: tensors like the first one have all axes, others the last one."""
    axes = _AXES[rank]
    inputs: dict[str, Tensor | Scalar] = {}
    outputs: dict[str, Tensor] = {}
    for parameter in export.declaration.parameters:
        param, kind = parameter.name, parameter.kind
        if param in left_out or param == "enable_pdl":
            continue
        if param == "scale":
            inputs[param] = Scalar("float32", description="What a consumer multiplies by.")
        elif not isinstance(kind, TensorKind):
            inputs[param] = Scalar("float32")
        elif param == "out":
            if out_description:
                inputs[param] = Tensor([*axes], dtype=out_dtype, description=out_description)
            source = "out" if out_description else "hidden_states"
            outputs["output"] = Tensor([*axes], param, dtype_from=source)
        else:
            name = "hidden_states" if param == "input" else param
            is_vector = not kind.like and parameter is not export.declaration.first
            # A weight that has not the dtype of the input is float32.
            dtype = None if kind.axis or kind.like else "float32"
            inputs[name] = Tensor([*axes][-1:] if is_vector else [*axes], param, dtype)
            if parameter.written:
                output = "output" if param == "input" else f"{param}_out"
                outputs[output] = Tensor([*axes], param, dtype_from="hidden_states")
    return TraceTemplate(
        op_type=op_type,
        name_prefix=export.function + ("_heads" if rank == 3 else "") + suffix,
        description=description,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=reference,
    )
