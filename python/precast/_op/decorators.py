# SPDX-License-Identifier: Apache-2.0
"""Say which GPUs and backends an op supports, and refuse a call that they do not.

:func:`backend_requirement` is put on an op, in one of three ways::

    @backend_requirement({}, common_check=served_by("norm"))       # there is nothing to choose
    def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None): ...

    @backend_requirement({"fa2": check_fa2, "fa3": check_fa3})     # the caller chooses
    def attention(q, k, v, backend="fa2"): ...

    @backend_requirement({"fa2": check_fa2, "fa3": check_fa3}, heuristic_func=order)
    def attention(q, k, v, backend="auto"):                        # the op may choose
        if backend == "auto":
            backend = attention.suitable_auto_backends[0]

A check takes the op's arguments, by the same names, and returns True or raises ``ValueError``. The
compute capabilities that it is for are declared with :func:`supported_compute_capability`, or taken
from the TOML by :func:`served_by`, which costs nothing a call.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from precast._op.docs import completed
from precast._op.requirement import Requirement, capability_number

__all__ = ["backend_requirement", "served_by", "supported_compute_capability"]

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_SKIP_CHECK = """
Other Parameters
----------------
skip_check : bool, keyword only
    True leaves out the validation that ``backend_requirement`` adds. Default: False.
"""


class CheckedOp(Protocol[P, R_co]):
    """An op behind :func:`backend_requirement`; ``skip_check=True`` leaves the validation out."""

    __name__: str
    suitable_auto_backends: Sequence[str]
    experimental_backends: frozenset[str]

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, skip_check: bool, **kwargs: Any) -> R_co: ...
    def is_backend_supported(self, name: str, cc: int | None = None) -> bool: ...
    def is_compute_capability_supported(self, cc: int) -> bool: ...
    def has_backend(self, name: str) -> bool: ...
    def has_backend_choices(self) -> bool: ...


# -- checks ---------------------------------------------------------------------------------------


def supported_compute_capability(supported_ccs: Iterable[int]) -> Callable[[F], F]:
    """Declare the compute capabilities that a check function's kernels run on.

    Parameters
    ----------
    supported_ccs : iterable of int
        Ten times the major plus the minor version: ``[80, 90, 103, 120]``.

    Returns
    -------
    callable
        A decorator. The function stays as it is and gets the method
        ``is_compute_capability_supported(cc)`` and the set ``_supported_ccs``, as FlashInfer's.

    Raises
    ------
    TypeError
        If ``supported_ccs`` is not iterable, or holds anything but integers; ``True`` is none.

    Examples
    --------
    >>> @supported_compute_capability([90, 100])
    ... def check(x):
    ...     return x.ndim == 2
    >>> check.is_compute_capability_supported(80)
    False
    """
    if isinstance(supported_ccs, (str, bytes)) or not isinstance(supported_ccs, Iterable):
        raise TypeError(
            f"supported_ccs must be an iterable of integers such as [80, 90], got "
            f"{type(supported_ccs).__name__} {supported_ccs!r}"
        )
    declared = set()
    for i, cc in enumerate(supported_ccs):
        declared.add(capability_number(cc, f"supported_ccs[{i}]"))

    def decorate(check: F) -> F:
        found: Any = check
        found._supported_ccs = declared
        found.is_compute_capability_supported = lambda cc: capability_number(cc) in declared
        return check

    return decorate


class served_by:  # noqa: N801 (used like a function)
    """The check of an op whose modules ``aot_configs/<op>.toml`` declares.

    The capabilities are those that the TOML's targets serve. Nothing runs at a call: the loader
    refuses a GPU that the op does not exist for when a call first asks it for a kernel there.

    Parameters
    ----------
    op : str
        The op of ``aot_configs/<op>.toml``.

    Examples
    --------
    >>> served_by("norm").is_compute_capability_supported(90)
    True
    """

    refused_by_loader = True

    def __init__(self, op: str) -> None:
        self.op = op
        self.__name__ = f"served_by({op!r})"

    def __call__(self, *args: object, **kwargs: object) -> bool:
        return True

    def is_compute_capability_supported(self, cc: int) -> bool:
        """Whether a module of the op runs on ``cc``; ValueError if there is no such op."""
        from precast._runtime.loader import loader

        ops, archs = loader.document["ops"], loader.document["archs"]
        if self.op not in ops:
            raise ValueError(f"{self.__name__}: no such op; legal: {', '.join(ops)}")
        major, minor = divmod(capability_number(cc), 10)
        return any(f"{major}.{minor}" in archs[name]["serves"] for name in ops[self.op]["archs"])


def reference_of(function: Callable[..., Any]) -> Any:
    """The function of its module with its name and ``_reference``, or None."""
    return getattr(function, "__globals__", {}).get(f"{function.__name__}_reference")


# -- the requirement ------------------------------------------------------------------------------


def backend_requirement(
    backend_checks: Mapping[str, Callable[..., Any]],
    common_check: Callable[..., Any] | None = None,
    heuristic_func: Callable[..., Sequence[str]] | None = None,
) -> Callable[[Callable[P, R_co]], CheckedOp[P, R_co]]:
    """Validate an op's calls, and let callers ask what it supports.

    Parameters
    ----------
    backend_checks : mapping of str to callable
        A check for each value of the op's argument ``backend``. Empty: there is no choice.
    common_check : callable, optional
        A check for every call.
    heuristic_func : callable, optional
        For ``backend="auto"``: takes the names of the backends that suit the call, then the op's
        arguments by name, and returns the names best first. What it leaves out is not used; a name
        that does not suit is dropped.

    Returns
    -------
    callable
        A decorator. The op's ``inspect.signature`` and docstring stay, and it gets

        - the keyword ``skip_check=True``, which leaves the validation out (``backend="auto"`` is
          still resolved);
        - ``is_backend_supported(name, cc=None)``, ``is_compute_capability_supported(cc)``,
          ``has_backend(name)`` and ``has_backend_choices()``. A backend whose check declares no
          compute capability supports none; ``experimental_backends`` is empty;
        - ``suitable_auto_backends``: what ``backend="auto"`` resolved to in the latest call of this
          thread, best first.

        A call raises ``BackendSupportedError`` if the backend or the GPU of its first CUDA tensor
        is not supported, or if ``"auto"`` finds nothing suitable; ``ValueError`` if a check returns
        False; and what a check raises. Without a CUDA tensor, no capability is asked for.

    Raises
    ------
    ValueError
        If there are backends to choose and the op has no argument ``backend``, or its default is
        ``"auto"`` without a heuristic.

    Notes
    -----
    With ``{}`` and :func:`served_by`, a call costs one more Python call and no validation.
    """

    def decorate(function: Callable[P, R_co]) -> CheckedOp[P, R_co]:
        requirement = Requirement(
            function.__name__, dict(backend_checks), common_check, heuristic_func
        )
        signature = inspect.signature(function)
        backend = signature.parameters.get("backend")
        if backend_checks and backend is None:
            raise ValueError(
                f"{function.__name__} must have an argument 'backend', because backend_requirement "
                f"lists {', '.join(backend_checks)}"
            )
        default = None if backend is None else backend.default
        if (
            default == "auto"
            and backend_checks
            and not ("auto" in backend_checks or heuristic_func)
        ):
            raise ValueError(
                f"{function.__name__}: backend='auto' is the default, so backend_requirement needs "
                f"heuristic_func"
            )
        return _checked(function, signature, requirement)

    return decorate


def _checked(
    function: Callable[P, R_co],
    signature: inspect.Signature,
    requirement: Requirement,
    body: Callable[[str], str] | None = None,
    names: Mapping[str, Any] | None = None,
) -> CheckedOp[P, R_co]:
    """The wrapper of an op with the methods that it gets."""
    wrapper = _wrapper(function, signature, requirement, body, names)
    functools.update_wrapper(wrapper, function)
    wrapper.is_backend_supported = requirement.is_backend_supported
    wrapper.is_compute_capability_supported = requirement.is_compute_capability_supported
    wrapper.has_backend = requirement.has_backend
    wrapper.has_backend_choices = requirement.has_backend_choices
    wrapper.suitable_auto_backends = requirement.suitable
    wrapper.experimental_backends = frozenset()
    checked: CheckedOp[P, R_co] = wrapper
    return checked


def decorated(
    function: Callable[P, R_co],
    requirement: Requirement,
    body: Callable[[str], str],
    names: dict[str, Any],
) -> CheckedOp[P, R_co]:
    """An op of the library: its wrapper's body, made from what validates, and its docstring."""
    function.__doc__ = completed(function)
    reference = reference_of(function)
    if reference is not None:
        reference.__doc__ = completed(reference, function)
    op = _checked(function, inspect.signature(function), requirement, body, names)
    op.__doc__ = f"{function.__doc__ or ''}\n{_SKIP_CHECK}".lstrip()
    return op


def _wrapper(
    function: Callable[..., Any],
    signature: inspect.Signature,
    r: Requirement,
    body: Callable[[str], str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """A function with exactly the op's parameters, and ``skip_check``."""
    kinds = inspect.Parameter
    parameters = list(signature.parameters.values())
    last = len(parameters) - any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    skip_check = kinds("skip_check", kinds.KEYWORD_ONLY, default=False)
    forms: dict[Any, str] = {
        kinds.VAR_POSITIONAL: "*{0}",
        kinds.VAR_KEYWORD: "**{0}",
        kinds.KEYWORD_ONLY: "{0}={0}",
    }
    passed = ", ".join(forms.get(p.kind, "{0}").format(p.name) for p in parameters)
    named = [p for p in parameters if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    names: dict[str, Any] = {"_function": function, "_validate": r.validate, **(extra or {})}
    # Errors about arguments have the op's name; a lambda has none.
    name = function.__name__
    if not name.isidentifier() or name in names:
        name = "call"
    lines = []
    if not r.runs_nothing:
        arguments = ", ".join(f"{p.name!r}: {p.name}" for p in named)
        lines = [
            f"    if not skip_check{' or backend == ' + repr('auto') if r.checks else ''}:",
            f"        _validate({{{arguments}}}, skip_check)",
        ]
    validation = "".join(f"{line}\n" for line in lines)
    source = f"{validation}    return _function({passed})" if body is None else body(validation)
    parameters.insert(last, skip_check)
    return generated(function, name, parameters, source, names)


def generated(
    function: Callable[..., Any],
    name: str,
    parameters: Sequence[inspect.Parameter],
    body: str,
    names: dict[str, Any],
) -> Any:
    """A function with these parameters and this body, which uses what is in ``names``.

    Its globals also have what the annotations of ``function`` name: ``infer_schema`` reads them.

    Its source is generated, as a dataclass's ``__init__`` is: packing ``*args, **kwargs`` and
    unpacking them again would cost more than all that is left of the budget of a call.
    """
    empty = inspect.Parameter.empty
    # The true defaults are set below; only where there is one matters in the source.
    declared = [
        p.replace(annotation=empty, default=empty if p.default is empty else None)
        for p in parameters
    ]
    exec(f"def {name}{inspect.Signature(declared)}:\n{body}", names)
    made = names[name]
    given = [p for p in parameters if p.default is not empty]
    made.__defaults__ = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY)
    made.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    known = getattr(function, "__globals__", {})
    for word in re.findall(r"[A-Za-z_]\w*", " ".join(map(str, function.__annotations__.values()))):
        if word in known:
            names.setdefault(word, known[word])
    return made
