# SPDX-License-Identifier: Apache-2.0
"""Other libraries that make the same call, with one module of this package each.

A peer's module has the name of the peer in tables and result files. It has

- ``PACKAGE``: the package that must be importable; otherwise the peer is left out;
- ``adapt(case, family)``: the peer's function with the arguments of ``case.make()``, or None if the
  peer has no such op. ``family`` is the routine, the ``<family>`` of ``bench_<family>.py``.

The package is only imported inside ``adapt``. Libraries come before the ways to run torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

Function = Callable[..., Any]


@functools.cache
def names() -> tuple[str, ...]:
    """Every peer that has an adapter, installed or not."""
    found = [module.name for module in pkgutil.iter_modules(__path__)]
    return tuple(sorted(found, key=lambda name: (_adapter(name).PACKAGE == "torch", name)))


def is_installed(name: str) -> bool:
    """Whether the peer's package is installed, without importing it."""
    return importlib.util.find_spec(_adapter(name).PACKAGE) is not None


@functools.cache
def distributions() -> list[str]:
    """Names of the installed peers' distributions, for their versions."""
    providing = importlib.metadata.packages_distributions()
    packages = {_adapter(name).PACKAGE for name in names()} - {"torch", "precast"}
    return sorted({d for package in packages for d in providing.get(package, ())})


def functions(case: Any, family: str, wanted: Sequence[str]) -> dict[str, Function]:
    """The peers in ``wanted`` that are installed and have the op, in the order of ``names()``."""
    found: dict[str, Function] = {}
    for name in names():
        if name in wanted and is_installed(name):
            function = _adapter(name).adapt(case, family)
            if function is not None:
                found[name] = function
    return found


def _adapter(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
