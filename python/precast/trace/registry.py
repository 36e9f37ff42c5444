# SPDX-License-Identifier: Apache-2.0
"""The templates of each function, which the decorator of public functions registers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from precast._base.lazy import import_all
from precast._base.public_name import public_name
from precast.trace.template import Reading, TraceTemplate

if TYPE_CHECKING:
    import inspect

    #: A template, or a function that chooses one from the call's arguments and lists all of them
    #: in ``.templates``.
    Trace: TypeAlias = TraceTemplate | Callable[..., TraceTemplate]


Form = TypeVar("Form", bound=Hashable)


class Traced(NamedTuple):
    """A function and its registered template or dispatch function."""

    function: Callable[..., Any]
    trace: Trace

    @property
    def templates(self) -> Sequence[TraceTemplate]:
        """All of its templates."""
        if isinstance(self.trace, TraceTemplate):
            return (self.trace,)
        return tuple(self.trace.templates)  # type: ignore[attr-defined]

    def choose(self, arguments: Mapping[str, Any]) -> TraceTemplate:
        """The template of a call."""
        if isinstance(self.trace, TraceTemplate):
            return self.trace
        chosen = self.trace(**arguments)
        if not any(chosen is template for template in self.templates):
            raise ValueError(
                f"{public_name(self.function)}: its dispatch function chose {chosen!r}, which it "
                f"does not list in .templates: {', '.join(map(repr, self.templates))}"
            )
        return chosen


#: By ``module.qualname``, which a decorator preserves, and which is the same after a reload.
_traced: dict[str, Traced] = {}


def dispatch(
    *templates: TraceTemplate,
) -> Callable[[Callable[..., TraceTemplate]], Callable[..., TraceTemplate]]:
    """Make a function, which gets all arguments of a call by name, choose among ``templates``.

    Examples
    --------
    >>> from precast._ops.norm.rmsnorm import rmsnorm
    >>> from precast.trace import registered
    >>> [template.name_prefix for f, template in registered() if f is rmsnorm]
    ['rmsnorm', 'rmsnorm_heads']
    """

    def decorate(choose: Callable[..., TraceTemplate]) -> Callable[..., TraceTemplate]:
        function: Any = choose
        function.templates = templates
        return choose

    return decorate


def by_form(
    find: Callable[..., Form], make: Callable[[Form], TraceTemplate], usual: Iterable[Form]
) -> Callable[..., TraceTemplate]:
    """Make a function that chooses a template by the form of a call.

    ``find`` gets all arguments of the call by name, and ``make`` a form. The usual forms are listed
    first; there may be too many to list, so the template of another is made at its first call.
    """
    templates = {form: make(form) for form in usual}

    def choose(**call: Any) -> TraceTemplate:
        form = find(**call)
        if form not in templates:
            templates.setdefault(form, make(form))  # Another thread may have been first.
        return templates[form]

    function: Any = choose
    function.templates = templates.values()  # It grows with them.
    return choose


def register(function: Callable[..., Any], trace: Trace) -> None:
    """Register the template of a function, or a dispatch function that chooses one.

    Raises
    ------
    TypeError
        If ``trace`` is neither.
    """
    if not isinstance(trace, TraceTemplate) and not getattr(trace, "templates", None):
        raise TypeError(
            f"{_key(function)}: trace must be a TraceTemplate, or a function that lists its "
            f"templates in .templates, got {trace!r}"
        )
    _traced[_key(function)] = Traced(function, trace)


def registered() -> list[tuple[Callable[..., Any], TraceTemplate]]:
    """Every (function, template) pair. Imports all ops."""
    import_all()
    return [(row.function, template) for row in _traced.values() for template in row.templates]


def find(function: Callable[..., Any]) -> Traced:
    """What is registered for a function, which may have been decorated further.

    Raises
    ------
    ValueError
        If nothing is registered.
    """
    try:
        return _traced[_key(function)]
    except (AttributeError, KeyError):
        raise ValueError(
            f"{function!r} has no trace template. Fix: decorate it with @precast_api(trace=...)"
        ) from None


def fi_trace(
    func_or_method: Callable[..., Any],
    *args: Any,
    save_dir: str | Path | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The definition of a call, in the schema of flashinfer-bench. The op does not run.

    Parameters
    ----------
    func_or_method : callable
        A public op; ``op.fi_trace(...)`` is the same.
    save_dir : str or Path, optional
        A folder in which ``<name>.json`` with the definition is written, too. It is made if it is
        missing.
    *args, **kwargs
        The arguments of the call. Tensors may be on any device, also ``meta``.

    Returns
    -------
    dict
        A definition as plain data: name, description, op_type, tags, axes, constraints, inputs,
        outputs, reference.

    Raises
    ------
    ValueError
        If the function has no template, tensors disagree on an axis, or a dtype is not in the
        schema.
    TypeError
        If the arguments do not fit the signature, or one should be a tensor and is not.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.empty(3, 4096, dtype=torch.bfloat16, device="meta")
    >>> precast.fi_trace(precast.rmsnorm, x, x[0])["name"]
    'rmsnorm_h4096'
    """
    row, template, reading = read_call(func_or_method, args, kwargs)
    definition = template.definition(reading, public_name(row.function))
    if save_dir is not None:
        write_definition(definition, Path(save_dir))
    return definition


def write_definition(definition: Mapping[str, Any], folder: Path) -> None:
    """Write ``<name>.json`` into a folder, by one rename, with the folders that are missing."""
    import json
    import os
    import threading

    folder.mkdir(parents=True, exist_ok=True)
    name = definition["name"]
    # Several processes may write the same definition: each writes its own file, and renames it.
    partial = folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
    try:
        partial.write_text(json.dumps(definition, indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / f"{name}.json")
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Traced, TraceTemplate, Reading]:
    """The template of a call, and what the template reads from the call."""
    row = find(function)
    # skip_check belongs to a decorator and is in no signature.
    named = {name: value for name, value in kwargs.items() if name != "skip_check"}
    try:
        bound = _signature(row.function).bind(*args, **named)
    except TypeError as error:
        raise TypeError(f"{public_name(row.function)}: {error}") from None
    bound.apply_defaults()
    template = row.choose(bound.arguments)
    return row, template, template.read(bound.arguments)


def check_template(function: Callable[..., Any], template: TraceTemplate) -> list[str]:
    """The problems of a template; an empty list if there are none.

    Each text has the wrong name and the legal ones. Only names are checked: those of parameters,
    axes, dtypes, and of the reference's parameters.
    """
    from precast.trace.check import problems

    place = f"{public_name(function)}: {template!r}"
    return [f"{place}: {text}" for text in problems(function, template)]


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    import inspect

    return inspect.signature(function)


def _key(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
