# SPDX-License-Identifier: Apache-2.0
"""The description of an op's calls with open sizes and dtypes, which a call's arguments fill in.

Nothing here imports torch, because templates are made when an op is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from precast.trace.fields import (
    DTYPES,
    Const,
    Scalar,
    Tensor,
    Var,
    axis_names,
    products,
    spread,
    written_out,
)

#: The dtype that names of definitions leave out.
_USUAL_DTYPE = "bfloat16"


class Reading(NamedTuple):
    """What a template reads from the arguments of a call."""

    sizes: dict[str, int]  # The size of every axis, by its name in the definition.
    spans: dict[str, int]  # The number of dimensions of each starred axis.
    dtypes: dict[str, str]  # The dtypes of the input tensors.
    rank: int  # The rank of the first tensor with a starred axis.


class TraceTemplate:
    """The definition of the calls of an op, without what the arguments of a call determine.

    Parameters
    ----------
    op_type : str
        The kind of operation, such as ``"rmsnorm"``; definitions of a kind share a folder.
    name_prefix : str
        The beginning of a definition's name; no two templates of the library have the same.
    description : str
        One sentence.
    axes : mapping of str to Var or Const
        Every axis of the tensors.
    inputs : mapping of str to Tensor or Scalar
        The inputs, in the order of the parameters of the definition's ``run``.
    outputs : mapping of str to Tensor
        The outputs; no name is also the name of an input.
    reference : callable
        The op in plain PyTorch, a function of a module. Its parameters have the names of the op's;
        it returns the outputs, as a tuple if there are several. Definitions contain its source.
    tags : sequence of str
        Further tags, besides ``fi_api:<function>``.
    constraints : sequence of str
        Python expressions of the axes that are true for every call.
    fixed : mapping of str to object
        Arguments, such as a layout, that are neither tensors nor numbers and are the same in every
        call of the template. The reference takes them, too.
    of_reference : mapping of str to object
        As ``fixed``, for parameters that only the reference has, such as a constant of the object
        of a method.
    fill : callable, optional
        Changes the arguments of :func:`make_inputs`, which it gets by parameter, so that they have
        legal values, such as indices, or sizes that fit each other.
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
        """The op's parameter of each input, or a path such as ``self.attribute``."""
        return {name: spec.param or name for name, spec in self.inputs.items()}

    def reference_params(self) -> dict[str, str]:
        """The reference's parameter of each input.

        It is the input's own name if the input is read by a path, and the name of the tuple's
        attribute if it is an item of a tuple that is.
        """
        return {
            name: param if "." not in param else _name_of_path(name, param, self.inputs[name])
            for name, param in self.input_params().items()
        }

    def values(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The value of each input in a call."""
        return [
            spec.of(argument(arguments, spec.param or name))
            if isinstance(spec, Tensor)
            else argument(arguments, spec.param or name)
            for name, spec in self.inputs.items()
        ]

    def written(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments to which the outputs of a call are written."""
        return tuple(spec.of(arguments[str(spec.param)]) for spec in self.outputs.values())

    def results(self, arguments: Mapping[str, Any], returned: Any) -> tuple[Any, ...]:
        """The outputs of a finished call in order, written in place or returned."""
        if returned is None:
            return self.written(arguments)
        fresh = _flat(returned)
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
        """Read sizes and element types from the arguments of a call.

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
        if type(value).__name__ == "SymInt":  # torch.compile traces the call.
            return value  # type: ignore[return-value]
        if not isinstance(value, int):
            raise ValueError(
                f"{self!r}: no tensor has the axis {name!r}, and parameter {param!r} gives no size "
                f"for it: got {value!r}"
            )
        return int(value)

    def key(self, reading: Reading) -> tuple[Any, ...]:
        """The key of a definition, which is different for any two definitions of this template."""
        sizes = tuple(reading.sizes[name] for name, _ in self.consts())
        return self.name_prefix, sizes, (*reading.spans.values(),), (*reading.dtypes.values(),)

    def name(self, reading: Reading) -> str:
        """The name of the definition, from :meth:`key` without the usual dtype and ranks."""
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
        """The definition of a call, of the function with this public name."""
        from precast.trace.reference import self_contained

        axes: dict[str, Any] = {}
        for name, axis in self.axes.items():
            if isinstance(axis, Const):
                axes[name] = _described({"type": "const", "value": reading.sizes[name]}, axis)
                continue
            for spread_name in axis_names(name, reading.spans):
                axes[spread_name] = _described({"type": "var"}, axis)
        dtypes = {
            **reading.dtypes,
            **{name: spec.dtype for name, spec in self.inputs.items() if isinstance(spec, Scalar)},
        }

        def described(spec: Tensor | Scalar, dtype: str | None) -> dict[str, Any]:
            shape = spread(spec.axes, reading.spans) if isinstance(spec, Tensor) else None
            return _described({"shape": shape, "dtype": dtype}, spec)

        items = [name for name, spec in self.input_tensors().items() if spec.item is not None]
        return {
            "name": self.name(reading),
            "description": self.description,
            "op_type": self.op_type,
            "tags": [f"fi_api:{function}", *self.tags],
            "axes": axes,
            "constraints": [
                written_out(text, reading.spans)
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
            "reference": self_contained(
                self.reference, self.reference_params(), self.of_reference, items
            ),
        }


_REQUIRED = object()


def argument(arguments: Mapping[str, Any], path: str, default: Any = _REQUIRED) -> Any:
    """An argument of a call, or an attribute of one; KeyError if it is not there."""
    param, *attributes = path.split(".")
    value = arguments[param] if default is _REQUIRED else arguments.get(param, default)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value


def _name_of_path(name: str, path: str, spec: Tensor | Scalar) -> str:
    if isinstance(spec, Tensor) and spec.item is not None:
        return path.rpartition(".")[2].lstrip("_")
    return name


def _flat(returned: Any) -> Iterator[Any]:
    """What a call has returned, one by one, without tuples in tuples and what is left out."""
    if isinstance(returned, tuple | list):
        for part in returned:
            yield from _flat(part)
    elif returned is not None:
        yield returned


def _described(row: dict[str, Any], spec: Var | Const | Tensor | Scalar) -> dict[str, Any]:
    return {**row, "description": spec.description} if spec.description else row


def _dtype_word(param: str, dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"{param}: the schema has no element type {name}; it has {', '.join(DTYPES)}"
        )
    return DTYPES[name]
