# SPDX-License-Identifier: Apache-2.0
"""The package ``flashinfer`` of :mod:`precast.shim.wheel` in one process, without a file."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from packaging.utils import canonicalize_name

from precast.shim.facade import PACKAGE
from precast.shim.wheel import DISTRIBUTION, wheel_files

_finder: _ShimFinder | None = None


def install(engine: str = "vllm") -> None:
    """Let ``import flashinfer`` give precast's names in this process, for tests and notebooks.

    Processes that this one starts do not have it, and no file is written: for an engine, use
    ``precast shim install``.

    Parameters
    ----------
    engine : str
        The engine that asks for a version: ``vllm`` or ``sglang``.

    Raises
    ------
    ValueError
        If ``engine`` is unknown.
    RuntimeError
        If FlashInfer itself was imported before.

    Examples
    --------
    >>> import precast.flashinfer
    >>> precast.flashinfer.install()
    >>> import flashinfer.norm
    >>> flashinfer.norm.rmsnorm is precast.rmsnorm
    True
    >>> precast.flashinfer.uninstall()
    """
    global _finder
    imported = sys.modules.get(PACKAGE)
    if imported is not None and not hasattr(imported, "__precast__"):
        raise RuntimeError(
            "FlashInfer itself is imported already. Fix: call "
            "install() before the first import of flashinfer"
        )
    files = wheel_files(engine)
    uninstall()
    _finder = _ShimFinder(files)
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo :func:`install`; modules that were imported keep the names that they have read."""
    global _finder
    if _finder is None:
        return
    sys.meta_path.remove(_finder)
    _finder = None
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


class _ShimFinder(importlib.metadata.DistributionFinder):
    """Find the modules and the distribution among the texts of files."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        place = name.replace(".", "/")
        for file in (f"{place}.py", f"{place}/__init__.py"):
            if file in self._files:
                loader = _ShimLoader(self._files[file])
                is_package = file.endswith("__init__.py")
                # Engines look beside this file for FlashInfer's headers, which are not there.
                return importlib.util.spec_from_loader(
                    name, loader, origin=__file__, is_package=is_package
                )
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if name is None or canonicalize_name(name) == DISTRIBUTION:
            yield _ShimDistribution(self._files)


class _ShimLoader(importlib.abc.InspectLoader):
    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text


class _ShimDistribution(importlib.metadata.Distribution):
    def __init__(self, files: dict[str, str]) -> None:
        self._texts = files

    def read_text(self, filename: str) -> str | None:
        texts = (self._texts[name] for name in self._texts if name.endswith(f"-info/{filename}"))
        return next(texts, None)

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)
