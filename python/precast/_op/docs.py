# SPDX-License-Identifier: Apache-2.0
"""Complete docstrings from what is written once.

A docstring leaves out what another one says. An argument that its section ``Parameters`` does not
have is taken from the sources: functions with an argument of that name, texts in the same form, and
:data:`COMMON`. An entry of several arguments is taken for those that the function has. A missing
section ``Returns``, ``Raises``, ``Warns`` or ``Notes`` is taken from the first source that has one,
``Returns`` only from a text or a function of the same return type. A reference takes ``Returns``
and ``Examples`` from its op alone, because the others say what is not true of plain PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Container
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

#: Arguments that mean the same in every op.
COMMON = """
Parameters
----------
enable_pdl : bool, optional
    Programmatic dependent launch. Default: on; without effect below compute capability 9.0.
"""

#: Sections about a call of a kernel.
_OF_OPS = ("Raises", "Warns", "Notes")

_SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)
_ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)


def documented(*sources: Callable[..., object] | str) -> Callable[[F], F]:
    """Complete the docstring of a function from ``sources``, the first that has an entry."""

    def decorate(function: F) -> F:
        function.__doc__ = completed(function, *sources)
        return function

    return decorate


def completed(function: Callable[..., object], *sources: Callable[..., object] | str) -> str | None:
    """The docstring of ``function`` with the entries of all of its arguments that are known."""
    text = inspect.getdoc(function)
    if text is None:  # python -OO
        return None
    sections = {**_sections(text)}
    own = _entries(sections.get("Parameters", ""))
    parameters = inspect.signature(function).parameters
    missing = [name for name in parameters if name not in own]
    before = len(own) + len(sections)
    wanted = ["Examples"] if function.__name__.endswith("_reference") else [*_OF_OPS]
    returned = _returned(function)
    for source in (*sources, COMMON):
        found = _sections(source if isinstance(source, str) else inspect.getdoc(source) or "")
        lacking = [name for name in missing if name not in own]
        if lacking and "Parameters" in found:
            own |= _entries(found["Parameters"], lacking)
        same = isinstance(source, str) or _returned(source) == returned
        returns = ["Returns"] if same and returned not in (None, "None") else []
        for title in (*wanted, *returns):
            if title in found:
                sections.setdefault(title, found[title])
    if before == len(own) + len(sections):
        return text
    # An entry of several arguments stands where the first of them does.
    ordered = dict.fromkeys(own[name] for name in parameters if name in own)
    if ordered:
        sections["Parameters"] = "".join(ordered)
    return _joined(sections)


def _returned(source: object) -> object:
    """What a function returns, as it is annotated."""
    return getattr(source, "__annotations__", {}).get("return", inspect.Signature.empty)


@functools.cache  # Several functions take entries of one source.
def _sections(text: str) -> dict[str, str]:
    """The texts of the sections of a numpy docstring by title; what is before them has none."""
    first, *rest = _SECTION.split(inspect.cleandoc(text) + "\n")
    return {"": first, **dict(zip(rest[::2], rest[1::2]))}


def _entries(section: str, wanted: Container[str] | None = None) -> dict[str, str]:
    """The entries of a section ``Parameters`` by the names that each is for, or for the wanted."""
    found = {}
    for entry in filter(None, _ENTRY.split(section)):
        head, _, text = entry.rstrip().partition("\n")
        names, *kind = head.split(" :", 1)
        kept = [n for n in names.split(", ") if wanted is None or n.lstrip("*") in wanted]
        head = " :".join([", ".join(kept), *kind])
        found.update({name.lstrip("*"): f"{head}\n{text}\n" for name in kept})
    return found


def _joined(sections: dict[str, str]) -> str:
    """A docstring of sections, in numpydoc's order."""
    titles = dict.fromkeys(("Parameters", "Returns", *_OF_OPS, *sections))
    parts = [
        f"{title}\n{'-' * len(title)}\n{sections[title].strip()}"
        for title in titles
        if title and title in sections
    ]
    return "\n\n".join([sections[""].strip(), *parts])
