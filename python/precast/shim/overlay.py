# SPDX-License-Identifier: Apache-2.0
"""Let functions of an installed FlashInfer be precast's, where precast has them.

Names are replaced when ``import flashinfer`` has ended, so that FlashInfer's own modules keep what
they imported from one another. What a program then reads is precast's if precast has an op of that
name, and FlashInfer's otherwise.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from precast._base import env
from precast._base.log import get_logger
from precast._base.version import __version__
from precast.shim.facade import MODULES, PACKAGE, of_precast

#: FlashInfer's own code and precast's each need the enums of these as they are.
_SUPPORT = ("", "tllm_enums", "utils")
#: Modules of precast with names for engines and enums, as above.
_NO_OPS = ("precast.shim.", "precast.tllm_enums")
#: The modules that have ops.
OVERLAID = tuple(path for path in of_precast() if path not in _SUPPORT)

_finder: _OverlayFinder | None = None


def overlay(*modules: str) -> None:
    """Let the names of an installed FlashInfer be precast's ops, now and as modules are imported.

    Parameters
    ----------
    *modules : str
        The modules of FlashInfer whose names are replaced, such as ``norm`` or ``decode``, there
        and at the top level. Default: all that precast has ops of.

    Raises
    ------
    ValueError
        If precast has no ops of such a module.
    RuntimeError
        If there is an overlay, or if precast itself serves ``flashinfer`` (``precast shim``).

    Notes
    -----
    What was imported from FlashInfer before keeps its meaning; ``from flashinfer import x`` that
    ran earlier is not changed.
    """
    global _finder
    unknown = [name for name in modules if name not in OVERLAID]
    if unknown:
        raise ValueError(f"precast has no ops of flashinfer.{unknown[0]}; legal: {_legal()}")
    if _finder is not None:
        raise RuntimeError("flashinfer is overlaid already. Fix: call remove_overlay() first")
    if hasattr(sys.modules.get(PACKAGE), "__precast__"):
        raise RuntimeError("precast serves flashinfer here: there is nothing to overlay")
    _finder = _OverlayFinder(modules or OVERLAID)
    sys.meta_path.insert(0, _finder)
    if PACKAGE in sys.modules:
        _finder.package_imported()


def remove_overlay() -> None:
    """Give FlashInfer's modules their own functions back; nothing happens without an overlay."""
    global _finder
    if _finder is not None:
        sys.meta_path.remove(_finder)
        _finder.restore()
        _finder = None


def overlay_from_environment() -> None:
    """Do what ``PRECAST_AS_FLASHINFER`` says; Python calls this as it starts, if that is set.

    A value without a meaning is one line on standard error: Python would print a traceback, and
    start as well.
    """
    if _finder is not None:  # Two folders of packages may each ask for it.
        return
    try:
        mode, _, modules = env.AS_FLASHINFER().partition(":")
        if mode:
            overlay(*(name.strip() for name in modules.split(",") if name.strip()))
    except ValueError as error:
        print(f"precast: {error}", file=sys.stderr)


def ops(path: str) -> dict[str, Any]:
    """The public functions and classes of precast's ops in a module of FlashInfer, by name."""
    found = {}
    homes = (home for home in MODULES[path] if not home.startswith(_NO_OPS))
    for home in map(importlib.import_module, homes):
        for name in dir(home):
            value = getattr(home, name)
            function = getattr(value, "func", value)  # A partial function says no module.
            defined_in = getattr(function, "__module__", None) or ""
            if not name.startswith("_") and defined_in.startswith("precast._ops."):
                found[name] = value
    return found


def _legal() -> str:
    return ", ".join(path for path in OVERLAID if ops(path))


class _OverlayFinder(importlib.abc.MetaPathFinder):
    """Find FlashInfer's modules as the other finders do, and replace names once they are run."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._is_imported = False
        #: What was replaced: the module, the name and FlashInfer's own value.
        self._originals: list[tuple[ModuleType, str, Any]] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root, _, below = name.partition(".")
        if root != PACKAGE or not (below in self._modules or not below):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _OverlayLoader(spec.loader, self)
        return spec

    def module_run(self, module: ModuleType) -> None:
        """Replace names of a module, once those of the package are."""
        path = module.__name__.partition(".")[2]
        if not path:
            self.package_imported()
        elif self._is_imported:
            self._replace(module, ops(path))

    def package_imported(self) -> None:
        """Replace names of the package and of its modules that are imported."""
        self._is_imported = True
        package = sys.modules[PACKAGE]
        if hasattr(package, "__precast__"):
            return
        everywhere: dict[str, Any] = {}
        for path in self._modules:
            names = ops(path)
            everywhere |= names
            module = sys.modules.get(f"{PACKAGE}.{path}")
            if module is not None:
                self._replace(module, names)
        self._replace(package, everywhere)
        version = getattr(package, "__version__", "of unknown version")
        count = len({name for _, name, _ in self._originals})
        get_logger().info(f"{count} functions of flashinfer {version} are precast {__version__}")

    def _replace(self, module: ModuleType, names: dict[str, Any]) -> None:
        for name, value in names.items():
            own = vars(module).get(name)
            # A module of that name is one that the package imported, as flashinfer.top_k may be.
            if own is not None and not isinstance(own, ModuleType):
                self._originals.append((module, name, own))
                setattr(module, name, value)

    def restore(self) -> None:
        """Undo all replacements."""
        for module, name, own in reversed(self._originals):
            setattr(module, name, own)


class _OverlayLoader(importlib.abc.Loader):
    """A module's own loader, and then the overlay."""

    def __init__(self, loader: Any, finder: _OverlayFinder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # Why: what looks for the sources of a module knows its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.module_run(module)
