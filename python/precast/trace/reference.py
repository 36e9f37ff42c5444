# SPDX-License-Identifier: Apache-2.0
"""The source of a reference with everything that it uses, as a text that runs by itself."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import symtable
import textwrap
import types
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from precast._base.torch import torch as lazy_torch


def self_contained(
    reference: Callable[..., Any],
    inputs: Mapping[str, str],
    fixed: Mapping[str, object] | None = None,
    tuples: Container[str] = (),
) -> str:
    """Python source that defines ``run``, which takes ``inputs`` in order.

    The text contains the functions of the reference's own package that it uses, and its numbers,
    strings and dtypes; everything else is imported.

    Parameters
    ----------
    reference : callable
        A function of a module.
    inputs : mapping of str to str
        The reference's parameter for each parameter of ``run``. Several parameters of ``run`` with
        the same one are passed as a tuple.
    fixed : mapping of str to object
        Literals for further parameters of the reference.
    tuples : container of str
        Parameters of ``run`` that are passed in a tuple even if they are alone.

    Raises
    ------
    TypeError
        If the source cannot be found, or it uses something that cannot be written as source.
    """
    names: dict[str, list[str]] = {}
    for name, param in inputs.items():
        names.setdefault(param, []).append(name)
    values = {param: _value(several, several[0] in tuples) for param, several in names.items()}
    values.update({param: repr(value) for param, value in (fixed or {}).items()})
    passed = ", ".join(f"{param}={value}" for param, value in values.items())
    return (
        f"{_sources(reference)}\n\n\n"
        f"@torch.no_grad()\n"
        f"def run({', '.join(inputs)}):\n"
        f"    return {reference.__name__}({passed})\n"
    )


def _value(names: Sequence[str], is_tuple: bool) -> str:
    if len(names) > 1:
        return f"({', '.join(names)})"
    return f"({names[0]},)" if is_tuple else names[0]


@functools.cache
def _sources(reference: Callable[..., Any]) -> str:
    parts = _Parts(reference)
    parts.add(reference)
    head = ["from __future__ import annotations", "", *sorted(parts.imports)]
    if parts.constants:
        head += ["", *parts.constants]
    return "\n\n\n".join(["\n".join(head), *parts.functions.values()])


class _Parts:
    """The imports, constants and functions that a reference uses, directly or not."""

    def __init__(self, reference: Callable[..., Any]) -> None:
        self.package = reference.__module__.partition(".")[0]
        self.imports = {"import torch"}
        self.constants: list[str] = []
        self.functions: dict[str, str] = {}
        self._known: dict[str, Any] = {}  # name -> value

    def add(self, function: Any) -> None:
        source = _source(function)
        self._know(function, function.__name__, function)  # It may be recursive.
        for name in sorted(_free_names(source)):
            if name in function.__globals__:
                self._use(function, name, function.__globals__[name])
            elif not hasattr(builtins, name):
                raise TypeError(f"{_place(function)}: its module has no {name!r}")
        self.functions.setdefault(function.__name__, source)

    def _use(self, function: Any, name: str, value: Any) -> None:
        if name in self._known and self._known[name] is value:
            return
        self._know(function, name, value)
        if isinstance(value, types.ModuleType):
            module = "torch" if value is lazy_torch else value.__name__
            if module.partition(".")[0] in (self.package, "precast"):
                raise TypeError(
                    f"{_place(function)}: {name!r} is a module of {module.partition('.')[0]}"
                )
            self.imports.add(f"import {module}" + (f" as {name}" if name != module else ""))
        elif isinstance(value, types.FunctionType) and self._is_own(value):
            if name != value.__name__:
                raise TypeError(
                    f"{_place(function)}: it calls {value.__name__} by another name, {name!r}"
                )
            self.add(value)
        elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            if self._is_own(value):
                raise TypeError(f"{_place(function)}: {name!r} is a class of {self.package}")
            self.imports.add(f"from {value.__module__} import {value.__qualname__} as {name}")
        elif _is_literal(value):
            self.constants.append(f"{name} = {value!r}")
        else:
            raise TypeError(
                f"{_place(function)}: it uses {name!r}, a {type(value).__name__}; a reference may "
                f"use modules, functions, numbers, strings and dtypes"
            )

    def _know(self, function: Any, name: str, value: Any) -> None:
        if self._known.setdefault(name, value) is not value:
            raise TypeError(f"{_place(function)}: two different things are called {name!r}")

    def _is_own(self, value: Any) -> bool:
        return str(value.__module__).partition(".")[0] == self.package


def _source(function: Any) -> str:
    if not isinstance(function, types.FunctionType) or "<" in function.__qualname__:
        raise TypeError(f"{_place(function)}: a reference must be a plain function of a module")
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()
    except OSError as error:
        raise TypeError(f"{_place(function)}: {error}") from None


def _free_names(source: str) -> set[str]:
    """The globals that a function uses when it runs, without those of its annotations."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)
    names: set[str] = set()
    tables = [symtable.symtable(ast.unparse(tree), "<reference>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            # At the top level, which has decorators and defaults, a name that is not defined there.
            outer = table.get_name() == "top" and not symbol.is_assigned()
            if symbol.is_referenced() and (outer or symbol.is_global()):
                names.add(symbol.get_name())
    return names


def _is_literal(value: Any) -> bool:
    import torch

    if isinstance(value, torch.dtype):
        return True
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (SyntaxError, ValueError):
        return False


def _place(function: Any) -> str:
    module = getattr(function, "__module__", "?")
    return f"reference {module}.{getattr(function, '__qualname__', function)!s}"
