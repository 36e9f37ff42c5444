# SPDX-License-Identifier: Apache-2.0
"""Packages whose public names are imported at their first use.

Such a package lists its names once, in ``__init__.pyi``, which type checkers and editors read too.
Each has an import of its own, from the module that defines it, so that nothing else is imported::

    from precast._ops.norm.rmsnorm import rmsnorm as rmsnorm

and has the two functions that PEP 562 asks for made in its ``__init__.py``::

    __getattr__, __dir__ = lazy_package(__name__, __file__)

A name that was read once is an attribute like any other. Submodules are imported the same way,
whether or not the stub lists them. Where a submodule has the name of something that the stub lists,
the package's attribute is the latter: ``precast.xqa`` is a function, and
``from precast.xqa import xqa`` finds it, too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One import of a stub. Reading it as Python would take a millisecond of every process.
_LINE = re.compile(r"^from (?P<module>\S+) import (?:\(\s*)?(?P<name>\w+) as (?P=name)\b", re.M)

#: The packages that :func:`lazy_package` was called for, in the order of the calls.
_packages: list[types.ModuleType] = []


def lazy_package(name: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, by its ``__name__`` and ``__file__``."""
    package = sys.modules[name]
    package.__class__ = _Package
    _packages.append(package)

    @functools.cache
    def homes() -> dict[str, str]:
        """The module of every public name, in the order of the stub."""
        stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
        return {line["name"]: line["module"] for line in _LINE.finditer(stub)}

    def get(attribute: str) -> Any:
        if attribute == "__all__":
            return list(homes())
        public, submodule = not attribute.startswith("_"), f"{name}.{attribute}"
        if public and homes().get(attribute, name) != name:
            value = getattr(importlib.import_module(homes()[attribute]), attribute)
        elif public and importlib.util.find_spec(submodule) is not None:
            value = importlib.import_module(submodule)
        else:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        setattr(package, attribute, value)
        return value

    package.__dict__["_homes"] = homes
    return get, lambda: sorted({*vars(package), *homes()})


class _Package(types.ModuleType):
    """A package whose public names stay when a submodule of that name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets every submodule.
        is_listed = isinstance(value, types.ModuleType) and not name.startswith("_")
        if not (is_listed and name in self.__dict__["_homes"]()):
            super().__setattr__(name, value)


def import_all() -> None:
    """Import every public name of every lazy package, so that whatever they register is there."""
    for package in _packages:
        for name in package.__all__:
            getattr(package, name)


def public_object(name: str) -> Any:
    """What the first lazy package that exports ``name``, which is ``precast`` itself, exports.

    Raises
    ------
    AttributeError
        If none does.
    """
    for package in _packages:
        if name in package.__all__:
            return getattr(package, name)
    raise AttributeError(f"no package exports {name!r}")
