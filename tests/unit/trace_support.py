# SPDX-License-Identifier: Apache-2.0
"""The data model of flashinfer-bench, and runs of what definitions hold."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@functools.cache
def _model() -> ModuleType | None:
    """``flashinfer_bench.data.definition`` without the rest of the package, which needs FlashInfer.

    Importing a submodule imports its packages first; bare ones of the same name and place do.
    """
    name = "flashinfer_bench"
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        return None
    before = {key: sys.modules.pop(key) for key in [*sys.modules] if key.split(".")[0] == name}
    try:
        for package in (name, f"{name}.data"):
            bare = ModuleType(package)
            folder = "/data" if package.endswith("data") else ""
            bare.__path__ = [f"{place}{folder}" for place in found.submodule_search_locations]
            sys.modules[package] = bare
        return importlib.import_module(f"{name}.data.definition")
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] == name]:
            del sys.modules[key]
        sys.modules.update(before)


def definition_model() -> Any:
    """The module with ``Definition`` and ``DType``; skips the test where it is not installed."""
    model = _model()
    if model is None:
        pytest.skip(
            "flashinfer-bench is not installed. Fix: pip install --no-deps flashinfer-bench"
        )
    return model


def run_of(definition: dict[str, Any]) -> Callable[..., Any]:
    """The function ``run`` of a definition's reference, from its text alone."""
    names: dict[str, Any] = {"__name__": "definition"}
    exec(definition["reference"], names)
    run = names["run"]
    assert callable(run)
    return run
