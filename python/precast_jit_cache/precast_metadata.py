# SPDX-License-Identifier: Apache-2.0
"""What the distributions' metadata takes from the plan, so that nothing is written twice.

Plugins of scikit-build-core (``[[tool.dynamic-metadata]]``): :class:`Core` for ``precast``,
:class:`Modules` for the distributions of prebuilt modules.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "python"))
try:
    from precast._base import env as _env
    from precast._base.version import __version__
    from precast._jit import cute_dsl
    from precast._jit.plan_files import target_archs
    from precast._jit.toolchain import find_toolkit
    from precast._plan.planner import Plan
    from precast.errors import ToolchainError
finally:
    sys.path.pop(0)


class Core:
    """Version, dependencies and extras of ``precast``; the settings hold the texts to fill in."""

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, Any]:
        plan = Plan.load(ROOT)
        extras = {name: list(texts) for name, texts in settings["optional-dependencies"].items()}
        for cuda in plan.build.cuda.values():
            for arch in plan.build.archs.values():
                if arch.cuda[0] <= cuda.major:
                    name = f"cu{cuda.major}-{arch.name}"
                    extras[name] = [f"precast-jit-cache-{name}=={__version__}"]
        return {
            "version": __version__,
            "dependencies": [
                text.format(tvm_ffi=_tvm_ffi_range(plan)) for text in settings["dependencies"]
            ],
            "optional-dependencies": extras,
        }


class Modules:
    """Version and dependencies of prebuilt modules.

    The setting ``cuda`` fixes the CUDA major; otherwise it is ``PRECAST_CUDA`` or that of the
    toolkit which is found, as in CMakeLists.txt.
    """

    def build_state(self, state: str) -> None:
        if state == "sdist":
            raise RuntimeError(
                "there is no sdist of prebuilt modules: they are built from a checkout. Fix: pip "
                "wheel ./python/precast_jit_cache"
            )

    def get_requires_for_dynamic_metadata(self, settings: Mapping[str, Any]) -> list[str]:
        plan = Plan.load(ROOT)
        requires = [f"apache-tvm-ffi{_tvm_ffi_range(plan)}"]  # its headers
        try:
            self._toolkit_major(plan, settings)
        except ToolchainError:
            requires += _core_settings()["optional-dependencies"]["jit"]
        return [*requires, *_cute_dsl(plan)]

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, Any]:
        plan = Plan.load(ROOT)
        major = _wanted_major(settings) or self._toolkit_major(plan, settings)
        return {
            "version": __version__,
            "dependencies": [
                f"apache-tvm-ffi{_tvm_ffi_range(plan)}",
                f"{plan.build.cuda[major].cudart_wheel}=={major}.*",
            ],
        }

    def _toolkit_major(self, plan: Plan, settings: Mapping[str, Any]) -> int:
        try:
            archs = target_archs(plan, _env.CUDA_ARCH_LIST())
        except ValueError:  # CMake reports the error, with its fix.
            archs = []
        newest = max(archs, key=lambda arch: arch.cuda, default=None)
        return find_toolkit(newest, _wanted_major(settings)).major


def _wanted_major(settings: Mapping[str, Any]) -> int | None:
    return settings.get("cuda") or _env.CUDA_MAJOR() or None


def _tvm_ffi_range(plan: Plan) -> str:
    return f">={plan.build.tvm_ffi_min},<{plan.build.tvm_ffi_max_exclusive}"


def _cute_dsl(plan: Plan) -> list[str]:
    """What compiles kernels in CuTe DSL, if a target has any."""
    try:
        specs = plan.modules(_env.PROFILE(), target_archs(plan, _env.CUDA_ARCH_LIST()))
    except ValueError:  # CMake reports the error, with its fix.
        return []
    return sorted({cute_dsl.requirement(spec) for spec in specs if spec.is_cute_dsl})


def _core_settings() -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings: dict[str, Any] = project["tool"]["dynamic-metadata"][0]
    return settings
