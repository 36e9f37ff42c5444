# SPDX-License-Identifier: Apache-2.0
"""The versions that precast works with, as the metadata of its wheels and the plan have them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from packaging.requirements import Requirement

from precast._jit.env import CACHE_LAYOUT
from precast._plan.config import CudaMajor
from precast._plan.planner import PLAN_SCHEMA, Plan
from precast._runtime.manifest import MANIFEST_SCHEMA
from sitegen import ROOT, markup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def requirements() -> str:
    """A row for Python and for each package that the core's wheel requires."""
    project = _toml("pyproject.toml")
    rows = [("Python", _range(project["project"]["requires-python"]))]
    for text in _core(project)["dependencies"]:
        need = Requirement(text)
        note = f" (only if `{need.marker}`)" if need.marker else ""
        rows.append((f"`{need.name}`", _range(str(need.specifier)) + note))
    return markup.table(("needs", "versions"), rows)


def cuda() -> str:
    """A row for each CUDA major: the driver, the runtime, and the compiler of released wheels."""
    toolkits = _toml("ci/images.toml")["cuda"]
    rows = [
        _cuda_row(major, toolkits[str(major.major)]["toolkit"])
        for major in Plan.load(ROOT).build.cuda.values()
    ]
    return markup.table(("CUDA", "driver from", "CUDA runtime", "wheels are compiled by"), rows)


def formats() -> str:
    """A row for each file format that a release may change."""
    rows = [
        ("plan", "`plan.json` in the core's wheel", str(PLAN_SCHEMA)),
        ("manifest", "`manifest.json` of each provider", str(MANIFEST_SCHEMA)),
        ("JIT cache", f"the folder `{CACHE_LAYOUT}` of the cache", CACHE_LAYOUT.lstrip("v")),
    ]
    return markup.table(("format", "where", "version"), rows)


def _cuda_row(major: CudaMajor, toolkit: str) -> tuple[str, ...]:
    runtime = f"`{major.cudart}`, of `{major.cudart_wheel}=={major.major}.*`"
    return (str(major.major), major.min_driver, runtime, f"nvcc {toolkit}")


def _core(project: Mapping[str, Any]) -> dict[str, Any]:
    """What the build fills into the metadata of the core."""
    path = ROOT / "python" / "precast_jit_cache" / "precast_metadata.py"
    spec = importlib.util.spec_from_file_location("precast_metadata", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = project["tool"]["dynamic-metadata"][0]
    found: dict[str, Any] = module.Core().dynamic_metadata(settings, project["project"])
    return found


def _range(specifier: str) -> str:
    """``>=2.10`` as words: ``2.10 or later``."""
    parts = sorted(specifier.split(","), reverse=True)
    words = [f"{p[2:]} or later" if p.startswith(">=") else f"below {p[1:]}" for p in parts]
    if any(not p.startswith((">=", "<")) or p.startswith("<=") for p in parts):
        return f"`{specifier}`"
    return ", ".join(words)


def _toml(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))
