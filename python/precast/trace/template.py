# SPDX-License-Identifier: Apache-2.0
"""What a call of an op means, with blanks, and how a call fills them in.

Nothing here imports torch: templates are made when ``precast`` is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

#: Element types of the schema, by their names in torch.
DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float4_e2m1fn_x2": "float4_e2m1",
    "int64": "int64",
    "int32": "int32",
    "int16": "int16",
    "int8": "int8",
    "uint8": "uint8",  # Not in flashinfer-bench's schema yet; FlashInfer's own traces have it.
    "bool": "bool",
}
#: What names of definitions leave unsaid.
_USUAL_DTYPE = "bfloat16"


class Var(NamedTuple):
    """An axis whose size differs from call to call: batch, tokens, pages.

    Its size is not part of a definition. An axis whose name starts with ``*`` stands for any number
    of leading dimensions: ``"*rows"`` becomes ``rows`` where it is one, else ``rows_0``,
    ``rows_1`` and so on. In expressions, ``rows`` is the product of them all.

    Parameters
    ----------
    description : str
        For the reader of a definition.
    value : str, optional
        The size as an expression of axes before it, for made inputs: another's size rounded up.
    sample : int, optional
        The size in generated calls, where not any is legal.
    in_data : bool
        No shape says the size, but values do: an axis that only outputs have.
    """

    description: str = ""
    value: str | None = None
    sample: int | None = None
    in_data: bool = False


class Const(NamedTuple):
    """An axis whose size belongs to the model: hidden size, heads. Each size is a definition.

    Parameters
    ----------
    abbrev : str, optional
        What stands before the size in a definition's name: ``"h"`` makes ``rmsnorm_h4096``.
        Default: the axis's name. Empty: the size is not in the name, because others decide it.
    description : str
        For the reader of a definition.
    param : str, optional
        The parameter that gives the size where no tensor has the axis. Default: the one that has
        the axis's name.
    value : str, optional
        The size as an expression of other axes and of scalar inputs, such as
        ``"gate_up_size // 2"``, where no input decides it. It is also written among the
        definition's constraints.
    multiple : int
        Made inputs have a multiple of this.
    sample : int, optional
        The size in generated calls, where a small one that no other axis has is not legal.
    """

    abbrev: str | None = None
    description: str = ""
    param: str | None = None
    value: str | None = None
    multiple: int = 16
    sample: int | None = None


class Tensor(NamedTuple):
    """A tensor that goes in or comes out.

    Parameters
    ----------
    axes : sequence of str
        The axis of each dimension.
    param : str, optional
        The op's parameter. Default for an input: the one of the same name. For an output: the
        parameter that it is written to, if there is one. For an input of a method also
        ``self.attribute``, of what the object was given before.
    dtype : str, optional
        The element type, where it is always the same. Default for an input: that of the call.
    dtype_from : str, optional
        For an output: the input whose element type it has.
    description : str
        For the reader of a definition.
    item : int, optional
        Which of them, for a parameter that is a tuple of tensors, each one listed by itself.
    """

    axes: Sequence[str]
    param: str | None = None
    dtype: str | None = None
    dtype_from: str | None = None
    description: str = ""
    item: int | None = None

    def of(self, value: Any) -> Any:
        """The tensor in the value of its parameter; what cannot be is returned as it is."""
        in_tuple = isinstance(value, tuple) and self.item is not None and self.item < len(value)
        return value[self.item] if in_tuple else value


class Scalar(NamedTuple):
    """A number that goes in; ``param`` is as for :class:`Tensor`. Its value is not recorded.

    ``sample`` is its value in generated calls. Default: the parameter's default, or some number.
    """

    dtype: str
    param: str | None = None
    description: str = ""
    sample: float | None = None


class Dtype(str):
    """The name of a torch dtype as a value in ``fixed``, for templates are made without torch."""

    def __repr__(self) -> str:
        return f"torch.{self}"


class Reading(NamedTuple):
    """What a template read off a call."""

    sizes: dict[str, int]  # of every axis, by its name in the definition
    spans: dict[str, int]  # how many dimensions each starred axis stands for
    dtypes: dict[str, str]  # of the input tensors
    rank: int  # of the first tensor with a starred axis


def spread(axes: Sequence[str], spans: Mapping[str, int]) -> list[str]:
    """The axes of a tensor as a definition writes them, without stars."""
    return [name for axis in axes for name in _names(axis, spans)]


def _names(axis: str, spans: Mapping[str, int]) -> list[str]:
    if not axis.startswith("*"):
        return [axis]
    span = spans[axis]
    return [axis[1:]] if span == 1 else [f"{axis[1:]}_{i}" for i in range(span)]


def products(sizes: Mapping[str, int], spans: Mapping[str, int]) -> dict[str, int]:
    """What an expression may name: every axis, and a starred one as the product of its axes."""
    whole = {axis[1:]: math.prod(sizes[name] for name in _names(axis, spans)) for axis in spans}
    return {**whole, **sizes}


def _written_out(expression: str, spans: Mapping[str, int]) -> str:
    """An expression as a definition writes it, whose axes have no stars."""
    for axis, span in spans.items():
        if span != 1:
            product = " * ".join(_names(axis, spans)) or "1"
            expression = re.sub(rf"\b{axis[1:]}\b", f"({product})", expression)
    return expression


class TraceTemplate:
    """The definition of a call, less what only a call can say.

    Parameters
    ----------
    op_type : str
        The kind of operation, such as ``"rmsnorm"``; definitions of a kind share a folder.
    name_prefix : str
        What a definition's name starts with; no two templates of the library share one.
    description : str
        One sentence.
    axes : mapping of str to Var or Const
        Every axis of the tensors.
    inputs : mapping of str to Tensor or Scalar
        What goes in, in the order of the reference's ``run``.
    outputs : mapping of str to Tensor
        What comes out; no name is also an input's.
    reference : callable
        The op in plain PyTorch, a function of a module. Its parameters carry the op's names; it
        returns the outputs, a tuple if there are several. Definitions hold its source.
    tags : sequence of str
        For grouping; ``fi_api:<function>`` is added.
    constraints : sequence of str
        Python expressions of the axes that hold for every call.
    fixed : mapping of str to object
        Arguments that are neither tensors nor numbers and the same in every call of the template,
        such as a layout; the reference takes them, too.
    of_reference : mapping of str to object
        The same for arguments of the reference that the op has not, such as what a method's object
        was made with.
    fill : callable, optional
        Gives the tensors of :func:`make_inputs` values that mean something, or sizes that fit each
        other: indices. It gets the arguments by parameter, and changes them.
    """

    def __init__(
        self,
        *,
        op_type: str,
        name_prefix: str,
        description: str,
        axes: Mapping[str, Var | Const],
        inputs: Mapping[str, Tensor | Scalar],
        outputs: Mapping[str, Tensor],
        reference: Callable[..., Any],
        tags: Sequence[str] = (),
        constraints: Sequence[str] = (),
        fixed: Mapping[str, object] | None = None,
        of_reference: Mapping[str, object] | None = None,
        fill: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.op_type = op_type
        self.name_prefix = name_prefix
        self.description = description
        self.axes = dict(axes)
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.reference = reference
        self.tags = tuple(tags)
        self.constraints = tuple(constraints)
        self.fixed = dict(fixed or {})
        self.of_reference = {**self.fixed, **(of_reference or {})}
        self.fill = fill

    def __repr__(self) -> str:
        return f"<TraceTemplate {self.name_prefix}>"

    def input_params(self) -> dict[str, str]:
        """The op's parameter of each input, or a path from one, such as ``self.attribute``."""
        return {name: spec.param or name for name, spec in self.inputs.items()}

    def reference_params(self) -> dict[str, str]:
        """The reference's parameter of each input; what is behind a path has the input's name."""
        return {n: n if "." in param else param for n, param in self.input_params().items()}

    def values(self, arguments: Mapping[str, Any]) -> list[Any]:
        """What a call passes for each input."""
        return [
            spec.of(argument(arguments, spec.param or name))
            if isinstance(spec, Tensor)
            else argument(arguments, spec.param or name)
            for name, spec in self.inputs.items()
        ]

    def written(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """The argument that each output of a call is written to."""
        return tuple(spec.of(arguments[str(spec.param)]) for spec in self.outputs.values())

    def results(self, arguments: Mapping[str, Any], returned: Any) -> tuple[Any, ...]:
        """The outputs of a call that was made: written in place, or else returned, in order."""
        if returned is None:
            return self.written(arguments)
        fresh = iter(returned if isinstance(returned, tuple) else (returned,))
        params = set(self.input_params().values())
        return tuple(
            spec.of(arguments[spec.param]) if spec.param in params else next(fresh)
            for spec in self.outputs.values()
        )

    def input_tensors(self) -> dict[str, Tensor]:
        return {name: spec for name, spec in self.inputs.items() if isinstance(spec, Tensor)}

    def consts(self) -> Iterator[tuple[str, Const]]:
        """The constant axes with their names."""
        return ((name, axis) for name, axis in self.axes.items() if isinstance(axis, Const))

    def read(self, arguments: Mapping[str, Any]) -> Reading:
        """Read sizes and element types off the arguments of a call.

        Raises
        ------
        ValueError
            If an argument is missing, two tensors disagree on an axis, or a dtype is not in the
            schema.
        TypeError
            If an argument should be a tensor and is not.
        """
        reading = Reading({}, {}, {}, 0)
        for name, spec in self.input_tensors().items():
            param = spec.param or name
            if param.partition(".")[0] not in arguments:
                raise ValueError(
                    f"{self!r}: input {name!r} reads parameter {param!r}, which the call does not "
                    f"have; it has {', '.join(arguments) or 'none'}"
                )
            value = spec.of(argument(arguments, param))
            if not (hasattr(value, "shape") and hasattr(value, "dtype")):
                raise TypeError(
                    f"{self!r}: {param} must be a torch.Tensor, got {type(value).__name__}"
                )
            reading = self._read_tensor(reading, param, spec, tuple(value.shape))
            reading.dtypes[name] = _dtype_word(param, value.dtype)
        for axis, const in self.consts():
            if axis not in reading.sizes:
                reading.sizes[axis] = self._size(axis, const, reading, arguments)
        return reading

    def whole_numbers(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """The scalar inputs of a call that an axis may be computed from."""
        values = {
            name: argument(arguments, spec.param or name, None)
            for name, spec in self.inputs.items()
            if isinstance(spec, Scalar)
        }
        return {name: int(value) for name, value in values.items() if isinstance(value, int)}

    def _read_tensor(
        self, reading: Reading, param: str, spec: Tensor, shape: tuple[int, ...]
    ) -> Reading:
        for axis in spec.axes:
            if axis.startswith("*"):
                span = len(shape) - len(spec.axes) + 1
                if axis not in reading.spans:
                    reading = reading._replace(rank=reading.rank or len(shape))
                reading.spans.setdefault(axis, span)
        names = spread(spec.axes, reading.spans)
        if len(names) != len(shape):
            raise ValueError(
                f"{self!r}: {param} must have the dimensions [{', '.join(names)}], got shape "
                f"{[*shape]}"
            )
        for axis, size in zip(names, shape):
            if reading.sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"{self!r}: axis {axis!r} is {size} in {param} and {reading.sizes[axis]} in a "
                    f"tensor before it"
                )
        return reading

    def _size(self, name: str, axis: Const, reading: Reading, arguments: Mapping[str, Any]) -> int:
        if axis.value is not None:
            known = {**self.whole_numbers(arguments), **products(reading.sizes, reading.spans)}
            size: int = eval(axis.value, {"__builtins__": {}}, known)
            return size
        param = axis.param or name
        value = arguments.get(param)
        if type(value).__name__ == "SymInt":  # While torch.compile traces.
            return value  # type: ignore[return-value]
        if not isinstance(value, int):
            raise ValueError(
                f"{self!r}: no tensor has the axis {name!r}, and parameter {param!r} gives no size "
                f"for it: got {value!r}"
            )
        return int(value)

    def key(self, reading: Reading) -> tuple[Any, ...]:
        """What tells two definitions of this template apart."""
        sizes = tuple(reading.sizes[name] for name, _ in self.consts())
        return self.name_prefix, sizes, (*reading.spans.values(),), (*reading.dtypes.values(),)

    def name(self, reading: Reading) -> str:
        """The name of the definition: what :meth:`key` says, the usual left out."""
        from precast._base.dtypes import DTYPE_WORDS

        parts = [self.name_prefix]
        for name, axis in self.consts():
            abbrev = name if axis.abbrev is None else axis.abbrev
            if abbrev:
                parts.append(f"{abbrev}{reading.sizes[name]}")
        for i, (axis_name, span) in enumerate(reading.spans.items()):
            if span != 1:
                parts.append(f"{axis_name[1:]}{span}d" if i else f"{reading.rank}d")
        open_inputs = [n for n, spec in self.input_tensors().items() if spec.dtype is None]
        dtypes = [reading.dtypes[name] for name in open_inputs]
        if len(set(dtypes)) == 1:
            dtypes = dtypes[:1]
        if dtypes != [_USUAL_DTYPE]:
            parts += [DTYPE_WORDS.get(f"torch.{dtype}", dtype) for dtype in dtypes]
        return "_".join(parts)

    def definition(self, reading: Reading, function: str) -> dict[str, Any]:
        """The definition of the call that was read, of the function with this public name."""
        from precast.trace.reference import self_contained

        axes: dict[str, Any] = {}
        for name, axis in self.axes.items():
            if isinstance(axis, Const):
                axes[name] = _described({"type": "const", "value": reading.sizes[name]}, axis)
                continue
            for spread_name in _names(name, reading.spans):
                axes[spread_name] = _described({"type": "var"}, axis)
        dtypes = {
            **reading.dtypes,
            **{name: spec.dtype for name, spec in self.inputs.items() if isinstance(spec, Scalar)},
        }

        def described(spec: Tensor | Scalar, dtype: str | None) -> dict[str, Any]:
            shape = spread(spec.axes, reading.spans) if isinstance(spec, Tensor) else None
            return _described({"shape": shape, "dtype": dtype}, spec)

        return {
            "name": self.name(reading),
            "description": self.description,
            "op_type": self.op_type,
            "tags": [f"fi_api:{function}", *self.tags],
            "axes": axes,
            "constraints": [
                _written_out(text, reading.spans)
                for text in (
                    *self.constraints,
                    *(f"{name} == {axis.value}" for name, axis in self.consts() if axis.value),
                )
            ],
            "inputs": {name: described(spec, dtypes[name]) for name, spec in self.inputs.items()},
            "outputs": {
                name: described(spec, spec.dtype or dtypes[str(spec.dtype_from)])
                for name, spec in self.outputs.items()
            },
            "reference": self_contained(self.reference, self.reference_params(), self.of_reference),
        }


_REQUIRED = object()


def argument(arguments: Mapping[str, Any], path: str, default: Any = _REQUIRED) -> Any:
    """An argument of a call, or an attribute of one; KeyError if it is not there."""
    param, *attributes = path.split(".")
    value = arguments[param] if default is _REQUIRED else arguments.get(param, default)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value


def _described(row: dict[str, Any], spec: Var | Const | Tensor | Scalar) -> dict[str, Any]:
    return {**row, "description": spec.description} if spec.description else row


def _dtype_word(param: str, dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"{param}: the schema has no element type {name}; it has {', '.join(DTYPES)}"
        )
    return DTYPES[name]
