# SPDX-License-Identifier: Apache-2.0
"""Check every argument of a public function by what is declared of it already.

Types follow from the annotations of the function, ranges from the declarations of its exports. The
check runs first in reference mode; otherwise it runs only after a call has failed, so that a call
that succeeds costs nothing. Numbers are those that apache-tvm-ffi takes: a ``float`` is any real
number, an ``int`` or a ``bool`` any integer, a bool among them; integers have 64 bits.

Words and caches are left to the ops, which raise errors of classes of their own.
"""

from __future__ import annotations

import enum
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from precast._base.torch import torch
from precast._op.declaration import Declaration
from precast._op.ranges import INT64, Range

#: What Python, PyTorch and bindings raise for an argument that is wrong.
RAW_KINDS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
#: The same in generated sources.
RAW_ERRORS = f"({', '.join(kind.__name__ for kind in RAW_KINDS)})"
#: Of integers that no export takes as they are: seeds are unsigned, too.
_ANY_64 = Range(-(2**63), 2**64 - 1)


class _Type(NamedTuple):
    """One member of an annotation: its words in errors, and what is of it."""

    words: str
    fits: Callable[[Any], bool]
    members: type[enum.Enum] | None = None


def _is_int(value: Any) -> bool:
    return isinstance(value, (numbers.Integral, torch.SymInt))


def _is_real(value: Any) -> bool:
    return isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat))


def _is_word(value: Any) -> bool:
    """Whether an op can compare ``value`` with its words, and say what is legal."""
    return not isinstance(value, torch.Tensor)


#: By annotation.
_TYPES: dict[str, _Type] = {
    "None": _Type("None", lambda value: value is None),
    "bool": _Type("a bool", _is_int),
    "float": _Type("a number", _is_real),
    "int": _Type("an integer", _is_int),
    "str": _Type("a string", _is_word),
    "torch.Generator": _Type("a torch.Generator", lambda value: isinstance(value, torch.Generator)),
    "torch.Tensor": _Type("a torch.Tensor", lambda value: isinstance(value, torch.Tensor)),
    "torch.dtype": _Type("a torch.dtype", lambda value: isinstance(value, torch.dtype)),
}


def _types(annotation: Any, names: Mapping[str, Any]) -> list[_Type]:
    """The members of an annotation; none where one of them may be anything."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [_Type(f"a {annotation.__name__}", _is_int, annotation)]
    if not isinstance(annotation, str):
        return []
    types: list[_Type] = []
    for word in annotation.split(" | "):
        if word in _TYPES:
            types.append(_TYPES[word])
            continue
        inner = _types(names.get(word), names)  # An alias of the module, or an enum.
        if not inner:
            return []
        types += inner
    return types


class Arguments:
    """The arguments of a public function, and what is legal for each.

    Parameters
    ----------
    function : callable
        Its annotations are strings, as ``from __future__ import annotations`` leaves them.
    name : str, optional
        What errors start with. Default: the name of the function.
    declarations : callable, optional
        Called once, at the first check: returns the declarations of the exports that it calls.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        declarations: Callable[[], Sequence[Declaration]] = tuple,
    ) -> None:
        self.name = name or function.__name__
        self._function = function
        self._declarations = declarations
        self._legal: dict[str, list[_Type]] | None = None
        self._ranges: dict[str, Range] = {}
        self._ranked: set[str] = set()

    def _prepare(self) -> dict[str, list[_Type]]:
        function = inspect.unwrap(self._function)
        parameters = inspect.signature(function).parameters.values()
        # Tensors that a call needs are named first, outputs among them last.
        order = sorted(
            (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)),
            key=lambda p: (p.annotation != "torch.Tensor", p.name == "out"),
        )
        names = {**function.__globals__}
        numbers_in_tensors = set()
        for declaration in self._declarations():
            self._ranges.update(declaration.ranges)
            numbers_in_tensors.update(declaration.of_any_rank)
        self._ranked = {p.name for p in order} - numbers_in_tensors
        found = {p.name: _types(p.annotation, names) for p in order}
        return {name: types for name, types in found.items() if types}

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise for the first value that is illegal: TypeError, or ValueError out of range."""
        if self._legal is None:
            self._legal = self._prepare()
        for name, types in self._legal.items():
            if name in values:
                _check(self.name, name, types, values[name], self._ranges.get(name))

    def check_ranks(self, error: BaseException, values: Mapping[str, Any]) -> None:
        """Raise for a tensor without a dimension, if ``error`` may be of Python that needs one."""
        of_python = type(error) in (IndexError, TypeError) or "to unpack" in str(error)
        if not of_python or str(error).startswith(f"{self.name}:"):
            return
        for name in self._legal or ():
            value = values.get(name)
            if name in self._ranked and isinstance(value, torch.Tensor) and value.dim() == 0:
                raise ValueError(
                    f"{self.name}: {name} must have at least 1 dimension, got shape []"
                ) from None


def _check(export: str, name: str, types: list[_Type], value: Any, legal: Range | None) -> None:
    if not any(kind.fits(value) for kind in types):
        words = " or ".join(kind.words for kind in types if kind.words != "None")
        shown = "" if value is None or isinstance(value, torch.Tensor) else f" {value!r:.40}"
        raise TypeError(
            f"{export}: {name} must be {words}, got {type(value).__name__}{shown}"
        ) from None
    if isinstance(value, numbers.Integral):
        taken = any(kind is _TYPES["float"] for kind in types)
        whole = INT64 if taken or legal is not None else _ANY_64
        if not whole.holds(value):
            words = (INT64 if legal is None or legal.holds(value) else legal).words
            raise ValueError(f"{export}: {name} must be {words}, got {value}") from None
        members = types[0].members
        if members is not None and value not in [member.value for member in members]:
            words = ", ".join(f"{member.value} ({member.name})" for member in members)
            raise ValueError(f"{export}: {name} must be {words}, got {value}") from None
    if legal is not None:
        check_ranges(export, {name: legal}, {name: value})


def check_number(export: str, name: str, value: Any, legal: Range) -> None:
    """Raise unless ``value`` is a number in its range, as :meth:`Arguments.check` does."""
    _check(export, name, [_TYPES["float"]], value, legal)


def check_integer(export: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is an integer of 64 bits."""
    _check(export, name, [_TYPES["int"]], value, INT64)


def check_flag(export: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is a bool, or an integer in the place of one."""
    _check(export, name, [_TYPES["bool"]], value, None)


def check_ranges(export: str, ranges: Mapping[str, Range], values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first number that is out of its range."""
    for name, legal in ranges.items():
        value = values.get(name)
        if isinstance(value, numbers.Real) and not legal.holds(value):
            raise ValueError(f"{export}: {name} must be {legal.words}, got {value}") from None
