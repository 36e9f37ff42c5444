# SPDX-License-Identifier: Apache-2.0
"""The public paths of what ``precast`` exports.

Definitions stand in private modules. The reference shows each one under the path that users import
it from: that of the public module that exports it, or ``precast`` itself where no other does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from types import ModuleType
from typing import NamedTuple

import precast
from precast import errors
from precast._base.public_name import public_name


class Public(NamedTuple):
    """A function or class that ``precast`` exports, and its public path."""

    name: str
    path: str

    @property
    def module(self) -> ModuleType:
        """The public module of the path."""
        return importlib.import_module(self.path.rpartition(".")[0])

    @property
    def is_op(self) -> bool:
        """Whether it is defined among the ops; everything else belongs to the run time."""
        return str(getattr(precast, self.name).__module__).startswith("precast._ops.")

    @property
    def reference(self) -> str | None:
        """The path of its PyTorch reference, if it has one."""
        value = getattr(precast, self.name)
        function = getattr(value, "reference", None)  # Wrapper classes have theirs as an attribute.
        if not inspect.isfunction(function):
            home = importlib.import_module(value.__module__)
            function = getattr(home, f"{self.name}_reference", None)
        if not inspect.isfunction(function):
            return None
        return public_name(function)


def exported() -> list[Public]:
    """Functions and classes that ``precast`` itself exports, in the order of its stub."""
    return [
        Public(name, public_name(value))
        for name, value in ((name, getattr(precast, name)) for name in precast.__all__)
        if not name.startswith("_")
        and (inspect.isroutine(value) or inspect.isclass(value))
        and value.__module__.startswith("precast.")
        and value.__qualname__ == name  # A second name is on the page of the first.
    ]


@functools.cache
def modules() -> tuple[ModuleType, ...]:
    """Public modules below ``precast``, in the order of their names, but for the command line."""
    names = [info.name for info in pkgutil.walk_packages(precast.__path__, "precast.")]
    public = [
        name
        for name in names
        if not any(part.startswith("_") or part == "cli" for part in name.split("."))
    ]
    return tuple(importlib.import_module(name) for name in sorted(public))


_ERROR = re.compile(r"^#+ .*\{ #precast\.errors\.(\w+) \}$", re.MULTILINE)


def with_definitions(markdown: str) -> str:
    """Give the heading of an error its private path as a second anchor, for docstrings' links."""

    def replace(match: re.Match[str]) -> str:
        kind = getattr(errors, match[1])
        return f"[](){{ #{kind.__module__}.{kind.__qualname__} }}\n{match[0]}"

    return _ERROR.sub(replace, markdown)
