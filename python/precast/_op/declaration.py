# SPDX-License-Identifier: Apache-2.0
"""The language in which an op declares its arguments, once for schema, checks, calls and traces.

A declaration lists the arguments of an export in order, separated by spaces::

    input:T[*rows(1-2),hidden] weight:T[hidden] eps:float out!:like(input) enable_pdl:pdl

``name:kind`` is an argument. ``!`` behind the name says that the op writes to it, ``?`` that it may
be None. The kinds are

``T[m,n]``
    A tensor. The letters ``T``, ``U``, ``V`` are dtypes that are axes of the module, in the order
    of the TOML's axes; ``U=e4m3|e5m2|T`` limits one. ``f32``, ``i32`` and the like are fixed
    dtypes, ``i32|i64`` one of several, ``any`` every dtype. A size is a name, which means the same
    number wherever it stands, a number, or an expression of names (``n//2``). ``*rows`` is any
    number of leading dimensions, ``*rows(1-2)`` one or two, ``*rows(1-)`` at least one; ``f32[.]``
    is one number in any shape. Without brackets, only dtype and device are checked, and the op's
    own check looks at the rest. The first tensor with sizes that is always there is the one that
    others are compared with.
``like(x)``, ``like(x,U)``, ``like(x,T,apart)``
    A tensor of the shape and dtype of ``x``, or of another dtype. It may be ``x`` itself unless it
    is ``apart``.
``tensor``
    A tensor that the op's own check looks at alone.
``float``, ``int``, ``bool``, ``size``
    A number; a ``size`` may be symbolic under ``torch.compile``. ``float(0-)`` is a finite one of
    at least 0, ``size(0-9)`` one from 0 to 9, ``float(-)`` any but NaN, ``float(finite)`` any that
    is finite as a float32, ``float(positive)`` such a one above 0.
``pdl``
    Programmatic dependent launch: None or a bool in public, on unless it is False.
``pdl_on``
    The same where callers have no choice: always on, and no public argument.

A family adds kinds of its own (:class:`Kind`), for an argument that reaches the export in another
form, such as a cache that is one tensor or two.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from precast._op.ranges import INT64, Range, read_range

_PARAMETER = re.compile(r"(?P<name>\w+)(?P<written>!?)(?P<optional>\??)(?::(?P<kind>\S+))?\Z")
_DTYPE = r"(?:(?P<axis>[TUV])(?:=|(?=[\[,)]|\Z)))?(?P<dtype>[a-z]\w*(?:\|\w+)*)?"
_TENSOR = re.compile(rf"{_DTYPE}(?:\[(?P<dims>[^\]]*)\])?\Z")
_LIKE = re.compile(rf"like\((?P<peer>\w+)(?:,{_DTYPE})??(?P<apart>,apart)?\)\Z")
_NUMBER = re.compile(r"(?P<kind>float|int|size)\((?P<range>[^)]*)\)\Z")
_LEADING = re.compile(r"\*(?P<name>\w+)(?:\((?P<least>\d+)(?P<range>-(?P<most>\d+)?)?\))?\Z")

#: Letters of the dtypes that are axes of a module.
AXES = ("T", "U", "V")


class Leading(NamedTuple):
    """Any number of leading dimensions, ``*rows(1-2)``; ``most`` is None without a limit."""

    name: str
    least: int = 0
    most: int | None = None


class TensorKind(NamedTuple):
    """A tensor: dtype and sizes, or the tensor that it is like."""

    axis: str = ""
    dtypes: tuple[str, ...] = ()
    dims: tuple[Leading | str, ...] | None = None
    like: str = ""
    apart: bool = False
    checked: bool = True


class Kind(NamedTuple):
    """An argument that reaches the export in a form of its own.

    Attributes
    ----------
    schema : str
        Its part of the torch schema. ``{name}`` is the argument's name, ``{w}`` the mark of a
        tensor that is written, if it is one.
    encode : str
        The source of what the export gets, from the public argument ``{name}``.
    decode : callable
        From what the export got back to the public argument.
    names : mapping
        What the source of ``encode`` calls, by name.
    legal : Range, optional
        The numbers that are legal, if the public argument is a number.
    """

    schema: str
    encode: str = "{name}"
    decode: Callable[..., Any] = lambda value: value
    names: Mapping[str, Any] = MappingProxyType({})
    legal: Range | None = None


# An export takes True for 1 and a fraction for a float; so do references, which get the number.
_NUMBERS = {
    "float": Kind("float {name}", decode=float),
    "int": Kind("int {name}", decode=operator.pos, legal=INT64),
    "bool": Kind("bool {name}"),
    "size": Kind("SymInt {name}", decode=operator.pos, legal=INT64),
    "pdl": Kind("bool {name}", "True if {name} is None else {name}"),
    "pdl_on": Kind("bool {name}", "True"),
}


class Parameter(NamedTuple):
    """One argument of a declaration."""

    name: str
    kind: TensorKind | Kind
    written: bool
    optional: bool

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.kind, TensorKind)

    @property
    def schema(self) -> str:
        """Its part of the torch schema; ``{w}`` stands for the mark of what is written."""
        if isinstance(self.kind, TensorKind):
            return f"Tensor{{w}}{'?' if self.optional else ''} {self.name}"
        return self.kind.schema.replace("{name}", self.name)

    @property
    def source(self) -> str:
        """The source of what the export gets."""
        if isinstance(self.kind, TensorKind):
            return self.name
        return self.kind.encode.replace("{name}", self.name)

    @property
    def is_constant(self) -> bool:
        """Whether the export always gets the same, so that there is no public argument."""
        return isinstance(self.kind, Kind) and "{name}" not in self.kind.encode


class Declaration:
    """The arguments of an export, read from their text.

    Attributes
    ----------
    parameters : tuple of Parameter
        The public arguments, in the order of the export.
    names : tuple of str
        The arguments of the export; a kind may make several of one.
    schema : str
        The torch schema, ``(Tensor input, ...) -> ()``.
    """

    def __init__(self, text: str, kinds: Mapping[str, Kind] | None = None) -> None:
        known = {**_NUMBERS, **(kinds or {})}
        self.parameters = tuple(_parameter(word, known) for word in text.split())
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        parts: list[str] = []
        self._counts: list[int] = []
        for parameter in self.parameters:
            pieces = parameter.schema.split(", ")
            self._counts.append(len(pieces))
            for piece in pieces:
                mark = f"({next(letters)}!)" if parameter.written and "{w}" in piece else ""
                parts.append(piece.replace("{w}", mark))
        self.schema = f"({', '.join(parts)}) -> ()"
        self.names = tuple(part.split()[-1] for part in parts)

    @property
    def ranges(self) -> dict[str, Range]:
        """The numbers that are legal, by argument."""
        kinds = {p.name: p.kind for p in self.parameters if isinstance(p.kind, Kind)}
        return {name: kind.legal for name, kind in kinds.items() if kind.legal is not None}

    @property
    def of_any_rank(self) -> list[str]:
        """The tensors that may have no dimension."""
        kinds = {p.name: p.kind for p in self.parameters if isinstance(p.kind, TensorKind)}
        return [
            name
            for name, kind in kinds.items()
            if kind.dims == (".",)
            or (kind.dims and all(isinstance(d, Leading) and not d.least for d in kind.dims))
        ]

    @property
    def tensors(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.is_tensor]

    @property
    def first(self) -> Parameter:
        """The tensor that others are compared with."""
        for parameter in self.tensors:
            kind = parameter.kind
            if isinstance(kind, TensorKind) and kind.dims is not None and not parameter.optional:
                return parameter
        return next((p for p in self.tensors if not p.written), self.tensors[0])

    @property
    def written(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.written]

    def axis(self, letter: str) -> Parameter | None:
        """The first tensor whose dtype is this axis of the module."""
        for parameter in self.tensors:
            if isinstance(parameter.kind, TensorKind) and parameter.kind.axis == letter:
                return parameter
        return None

    def decoded(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """The public arguments, by name, from those of the export."""
        given: dict[str, Any] = {}
        position = 0
        for parameter, count in zip(self.parameters, self._counts):
            part = values[position : position + count]
            position += count
            kind = parameter.kind
            given[parameter.name] = part[0] if isinstance(kind, TensorKind) else kind.decode(*part)
        return given


def _parameter(word: str, kinds: Mapping[str, Kind]) -> Parameter:
    match = _PARAMETER.match(word)
    if match is None:
        raise ValueError(f"{word!r} declares no argument; legal: name:kind, name!:kind, name?:kind")
    kind_text = match["kind"] or match["name"]
    return Parameter(
        match["name"], _kind(kind_text, kinds), bool(match["written"]), bool(match["optional"])
    )


def _kind(text: str, kinds: Mapping[str, Kind]) -> TensorKind | Kind:
    if text in kinds:
        return kinds[text]
    number = _NUMBER.match(text)
    if number is not None:
        legal = read_range(number["range"], number["kind"] == "float")
        return kinds[number["kind"]]._replace(legal=legal)
    if text == "tensor":
        return TensorKind(checked=False)
    like = _LIKE.match(text)
    if like is not None:
        axis, dtypes = _dtypes(like)
        return TensorKind(axis, dtypes, None, like["peer"], bool(like["apart"]))
    tensor = _TENSOR.match(text)
    if tensor is None or not (tensor["axis"] or tensor["dtype"]):
        raise ValueError(
            f"{text!r} is no kind of argument; legal: a dtype with sizes such as T[m,n], like(x), "
            f"{', '.join(kinds)}"
        )
    axis, dtypes = _dtypes(tensor)
    if tensor["dims"] is None:
        return TensorKind(axis, dtypes)
    return TensorKind(axis, dtypes, tuple(_dim(d) for d in tensor["dims"].split(",") if d))


def _dtypes(match: re.Match[str]) -> tuple[str, tuple[str, ...]]:
    """The letter of an axis, and the dtypes that are legal; none stands for all."""
    words = (match["dtype"] or "").split("|")
    return match["axis"] or "", () if words in ([""], ["any"]) else tuple(words)


def _dim(text: str) -> Leading | str:
    match = _LEADING.match(text)
    if match is None:
        return text
    if match["least"] is None:
        return Leading(match["name"])
    least = int(match["least"])
    if match["range"] is None:
        return Leading(match["name"], least, least)
    return Leading(match["name"], least, int(match["most"]) if match["most"] else None)
