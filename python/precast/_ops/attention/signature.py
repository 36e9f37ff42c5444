# SPDX-License-Identifier: Apache-2.0
"""Decorators for methods that take the arguments of another."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from precast._op import mode
from precast._op.decorators import generated
from precast._op.ranges import INT64
from precast._op.scalars import RAW_ERRORS, Arguments
from precast._ops.attention.validation import NUMBERS, SCALES

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


def arguments_of(
    other: Callable[..., Any],
    without: Sequence[str] = (),
    checks_first: bool = False,
    unread: Sequence[str] = (),
) -> Callable[[Callable[[Any, Any], Result]], Callable[..., Result]]:
    """Give a method the parameters of another but some; it gets their values as attributes.

    ``checks_first`` is for a method that no layer calls, as of :func:`checked_first`, and
    ``unread`` as :func:`gathers` takes it.
    """
    kinds = inspect.Parameter
    parameters = [
        p.replace(kind=kinds.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(other).parameters.values()
        if p.kind is not kinds.VAR_POSITIONAL and p.name not in without
    ]

    def decorate(method: Callable[[Any, Any], Result]) -> Callable[..., Result]:
        call = _gathering(method, method, parameters, other, checks_first, unread)
        returned = inspect.signature(method).return_annotation
        call.__signature__ = inspect.Signature(parameters, return_annotation=returned)
        result: Callable[..., Result] = call
        return result

    return decorate


def gathers(
    method: Callable[[Any, Any], Any],
    unread: Sequence[str] = (),
    like: Callable[..., Any] | None = None,
    **constants: object,
) -> Callable[[Method], Method]:
    """Give a method without a body that of ``method``, which gets the arguments as attributes.

    Nothing fails for a wrong argument that is ``unread``: it is ignored, or its truth alone counts.
    ``constants`` are more attributes, and so are the defaults of those arguments of ``like`` that
    the method does not have.
    """

    def decorate(declared: Method) -> Method:
        parameters = [*inspect.signature(declared).parameters.values()]
        if like is not None:
            own = {p.name for p in parameters}
            for p in inspect.signature(like).parameters.values():
                if p.name not in own and p.default is not p.empty:
                    constants.setdefault(p.name, p.default)
        gathered: Method = _gathering(
            method, declared, parameters, declared, False, unread, **constants
        )
        return gathered

    return decorate


def _gathering(
    method: Callable[[Any, Any], Any],
    declared: Callable[..., Any],
    parameters: list[inspect.Parameter],
    annotated: Callable[..., Any],
    checks_first: bool = False,
    unread: Sequence[str] = (),
    **constants: object,
) -> Any:
    names = _names(parameters)
    given = namedtuple(f"{declared.__name__}_arguments", names)  # type: ignore[misc]
    arguments = public_arguments(annotated, declared.__qualname__)
    for name, value in {**constants, "public_arguments": arguments}.items():
        setattr(given, name, value)
    found = {"_new": tuple.__new__, "_given": given, "_method": method, "_arguments": arguments}
    passed = _by_name(names)
    condition = str(checks_first or "_reference")
    if unread:
        # Why: types that have passed once, and the sizes of integers, cost 20 ns an argument.
        types = f"({', '.join(f'{name}.__class__' for name in unread)},)"
        found |= {"_passed": {}, "_least": INT64.least, "_most": INT64.most}
        sizes = (
            f" or not _least <= ({p.name} or 0) <= _most"
            for p in parameters
            if p.name in unread and "int" in p.annotation
        )
        condition += f" or _passed.get({types}) is None{''.join(sizes)}"
    remembered = f"        _passed[{types}] = True\n" if unread else ""
    rest = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    refused = f"    if {rest[0]}:\n        _refuse(self, {rest[0]})\n" if rest else ""
    found["_refuse"] = _refuse_more
    body = (
        f"{refused}    if {condition}:\n        _arguments.check({passed})\n{remembered}"
        f"    try:\n        return _method(self, _new(_given, ({', '.join(names)},)))\n"
        f"    except {RAW_ERRORS} as error:\n        _arguments.check({passed})\n"
        f"        _arguments.check_ranks(error, {passed})\n        raise"
    )
    call = generated(declared, declared.__name__, parameters, body, found)
    mode.follow(call.__globals__)
    return functools.update_wrapper(call, declared)


def _refuse_more(wrapper: Any, args: tuple[object, ...]) -> None:
    raise TypeError(
        f"{wrapper._name}: takes no further arguments by position, got {len(args)}: "
        f"{', '.join(type(value).__name__ for value in args)}"
    )


def public_arguments(function: Callable[..., Any], name: str) -> Arguments:
    """Return what is legal for the arguments of a function, numbers of attention among them."""
    return Arguments(function, name, declarations=lambda: [NUMBERS, SCALES])


def _names(parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Return the names of all parameters but ``self`` and those by position."""
    return [p.name for p in parameters[1:] if p.kind is not p.VAR_POSITIONAL]


def _by_name(names: Sequence[str]) -> str:
    """Return the source of a dictionary of arguments."""
    return f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"


def checked_first(method: Method) -> Method:
    """Check all arguments of a method before it runs: for one that no layer calls."""
    parameters = [*inspect.signature(method).parameters.values()]
    names = _names(parameters)
    owner = method.__qualname__.rpartition(".")[0]
    name = owner if method.__name__ == "__init__" else method.__qualname__
    found = {"_method": method, "_arguments": public_arguments(method, name)}
    body = f"    _arguments.check({_by_name(names)})\n    return _method(self, {', '.join(names)})"
    checked: Any = generated(method, method.__name__, parameters, body, found)
    functools.update_wrapper(checked, method)
    return checked  # type: ignore[no-any-return]


def options_by_position(plan: Method) -> Method:
    """Take options of ``plan()`` by position, with a warning: that is deprecated."""
    parameters = list(inspect.signature(plan).parameters.values())
    kinds = [p.kind for p in parameters]
    required = kinds.index(inspect.Parameter.VAR_POSITIONAL)  # ``self`` is one of them.
    # They once followed ``page_size``; newer options never did.
    named = [p.name for p in parameters[required + 1 :]]
    options_in_order = [name for name in named if name not in ("window_right", "is_causal")]

    @functools.wraps(plan)
    def planned(self: Any, *args: Any, **options: Any) -> None:
        if len(args) >= required:
            given, args = args[required - 1 :], args[: required - 1]
            options = _merged(f"{self._name}.plan()", options_in_order, given, options)
        plan(self, *args, **options)

    return planned  # type: ignore[return-value]


def _merged(
    name: str, names: list[str], given: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    if len(given) > len(names):
        raise TypeError(
            f"{name} accepts at most {len(names)} deprecated optional positional arguments "
            f"after page_size; got {len(given)}"
        )
    by_position = dict(zip(names, given))
    for option in by_position:
        if option in options:
            raise TypeError(f"{name} got multiple values for argument {option!r}")
    warnings.warn(
        f"Passing optional arguments to {name} positionally is deprecated; pass them as keyword "
        f"arguments instead",
        DeprecationWarning,
        stacklevel=3,
    )
    return {**options, **by_position}


def returning_lse(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``run_return_lse`` of ``run``, as ``functools.partialmethod(run, return_lse=True)``.

    TorchDynamo cannot trace that.
    """

    @functools.wraps(run)
    def run_return_lse(self: Any, *args: Any, **options: Any) -> Any:
        return run(self, *args, **{"return_lse": True, **options})

    signature = inspect.signature(functools.partial(run, return_lse=True))
    run_return_lse.__signature__ = signature  # type: ignore[attr-defined]
    return run_return_lse
