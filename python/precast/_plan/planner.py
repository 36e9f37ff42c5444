# SPDX-License-Identifier: Apache-2.0
"""The planner expands ``aot_configs/`` into the modules that can exist and those that are prebuilt.

CMake, JIT, loader, command line, tests and documentation all read this plan. It needs nothing but
the standard library, so that a build environment without torch or tvm-ffi can run it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from precast._base.errors import UnsupportedConfigError, UnsupportedTargetError
from precast._base.names import axis_word, module_name
from precast._base.version import __version__
from precast._plan.config import Arch, AxisValue, BuildConfig, Config, OpConfig, load_config
from precast._plan.includes import SourceFiles
from precast._plan.spec import ModuleSpec

PLAN_SCHEMA = 2


@dataclass(frozen=True)
class Plan:
    """The configuration space of one source tree (a checkout or the installed package data)."""

    root: Path
    config: Config

    @classmethod
    def load(cls, root: Path) -> Plan:
        return cls(root, load_config(root))

    @property
    def build(self) -> BuildConfig:
        return self.config.build

    # -- one module -------------------------------------------------------------------------------

    def axes(self, op: str, values: Mapping[str, object]) -> dict[str, AxisValue]:
        """``values`` checked against the op's axes, in declared order.

        Raises
        ------
        UnsupportedConfigError
            If an axis is missing or unknown, or a value or a combination of values is not legal.
        """
        return self.config.op(op).space.checked(op, values)

    def spec(
        self,
        op: str,
        values: Mapping[str, object],
        arch: Arch | str,
        cuda_major: int | None = None,
    ) -> ModuleSpec:
        """The module of one configuration, prebuilt or not; by default of the newest CUDA."""
        config = self.config.op(op)
        if isinstance(arch, str):
            arch = self.target(op, arch)
        if arch.name not in config.archs:
            raise UnsupportedTargetError(
                f"{op} does not support compute capability {' or '.join(arch.serves)}: it does not "
                f"exist for {arch.name}; legal: {', '.join(config.archs)}"
            )
        axes = self.axes(op, values)
        name = module_name(op, axes)
        if cuda_major is None:
            cuda_major = self.build.newest_cuda
        is_aot = arch.cuda[0] <= cuda_major and name in self._aot_names(op)
        return self._spec(config, name, axes, arch, cuda_major, is_aot)

    def _spec(
        self,
        config: OpConfig,
        name: str,
        axes: Mapping[str, AxisValue],
        arch: Arch,
        cuda_major: int,
        is_aot: bool,
    ) -> ModuleSpec:
        return ModuleSpec(
            name=name,
            arch=arch,
            sources=config.sources,
            defines=(
                f"PRECAST_SM={arch.number}",
                *(f"PRECAST_{axis.upper()}={axis_word(value)}" for axis, value in axes.items()),
            ),
            exports=config.exports,
            op=config.name,
            axes=axes,
            is_aot=is_aot,
            **self.common(cuda_major, config.cuda_flags),
        )

    def common(self, cuda_major: int, cuda_flags: Sequence[str] = ()) -> dict[str, Any]:
        """The fields of a ``ModuleSpec`` that every module of one CUDA major shares."""
        build = self.build
        if cuda_major not in build.cuda:
            raise UnsupportedConfigError(
                f"CUDA {cuda_major} is not supported; legal: {', '.join(map(str, build.cuda))}"
            )
        return {
            "cuda_major": cuda_major,
            "root": self.root,
            "cuda_flags": (
                *build.cuda_flags,
                *build.cuda_major_flags.get(cuda_major, ()),
                *cuda_flags,
            ),
            "host_flags": build.host_flags,
            "link_flags": build.link_flags,
            "version_script": build.version_script,
            "tvm_ffi_range": (build.tvm_ffi_min, build.tvm_ffi_max_exclusive),
            "cute_dsl": build.cute_dsl,
            "cudart": build.cuda[cuda_major].cudart,
        }

    # -- targets ----------------------------------------------------------------------------------

    def arch(self, name: str, *, any_suffix: bool = False) -> Arch:
        """:meth:`BuildConfig.arch`: a target by folder name or capability."""
        return self.build.arch(name, any_suffix=any_suffix)

    def target(self, op: str, name: str) -> Arch:
        """:meth:`arch`; for a bare capability the best target that the op exists for."""
        serving = self.build.accepted(name)
        offered = [arch for arch in serving if arch.name in self.config.op(op).archs]
        return offered[0] if offered else self.arch(name)

    def archs(self, text: str | Iterable[str], *, any_suffix: bool = False) -> list[Arch]:
        """Targets of a list such as ``"8.0 9.0a"`` (spaces, commas or semicolons)."""
        words = re.split(r"[\s,;]+", text.strip()) if isinstance(text, str) else list(text)
        found = (self.arch(word, any_suffix=any_suffix) for word in words if word)
        return list(dict.fromkeys(found))

    # -- the prebuilt set -------------------------------------------------------------------------

    def _blocks(self, op: str, profile: str | None) -> list[dict[str, AxisValue]]:
        config = self.config.op(op)
        wanted = None if profile is None else self.build.profile_names(profile)
        rows: dict[str, dict[str, AxisValue]] = {}
        for block in config.aot:
            if wanted is None or not block.profiles or wanted & set(block.profiles):
                for axes in block.space.points():
                    rows.setdefault(module_name(op, axes), axes)
        return list(rows.values())

    def _aot_names(self, op: str) -> set[str]:
        return {module_name(op, axes) for axes in self._blocks(op, None)}

    def aot_axes(self, profile: str | None = None) -> list[tuple[str, dict[str, AxisValue]]]:
        """Op and axes of everything that a profile (None: any) prebuilds, without targets."""
        return [(op, axes) for op in self.config.ops for axes in self._blocks(op, profile)]

    def modules(
        self,
        profile: str | None = None,
        archs: Iterable[Arch] | None = None,
        cuda_major: int | None = None,
    ) -> list[ModuleSpec]:
        """The prebuilt modules of a profile (None: of any) for some targets (None: all).

        The CUDA major is the newest unless it is given.
        """
        cuda_major = self.build.newest_cuda if cuda_major is None else cuda_major
        limited = self.build.profiles[profile].archs if profile and archs is None else ()
        targets = list(self.build.archs.values()) if archs is None else list(archs)
        if limited:
            targets = [arch for arch in targets if arch.name in limited]
        specs = []
        for op, axes in self.aot_axes(profile):
            config = self.config.op(op)
            specs += [
                self._spec(config, module_name(op, axes), axes, arch, cuda_major, True)
                for arch in targets
                if arch.name in config.archs
            ]
        return specs

    # -- what other tools read --------------------------------------------------------------------

    @cached_property
    def document(self) -> dict[str, Any]:
        """The plan as plain data: what the core wheel ships and the loader binds at import."""
        modules: dict[str, dict[str, Any]] = {}
        contents: dict[str, str] = {}  # of each op, read once
        files: SourceFiles | None = None
        for major in self.build.cuda:
            for spec in self.modules(cuda_major=major):
                if self.build.archs[spec.arch.name].cuda[0] > major:
                    continue
                row = modules.setdefault(
                    spec.name, {"op": spec.op, "axes": dict(spec.axes), "fingerprints": {}}
                )
                files = files or SourceFiles(spec.include_folders)  # the same for all ops
                if spec.op not in contents:
                    contents[spec.op] = spec.contents(files)
                fingerprint = spec.fingerprint_of(contents[spec.op])
                row["fingerprints"].setdefault(f"cu{major}", {})[spec.arch.name] = fingerprint
        return {
            "schema": PLAN_SCHEMA,
            "version": __version__,
            "tvm_ffi": {
                "min": self.build.tvm_ffi_min,
                "max_exclusive": self.build.tvm_ffi_max_exclusive,
            },
            "cuda": {
                str(row.major): {
                    "min_driver": row.min_driver,
                    "cudart": row.cudart,
                    "cudart_wheel": row.cudart_wheel,
                }
                for row in self.build.cuda.values()
            },
            "archs": {
                arch.name: {
                    "target": arch.target,
                    "serves": list(arch.serves),
                    "shared_kib": arch.shared_kib,
                }
                for arch in self.build.archs.values()
            },
            "ops": {
                op.name: {
                    "axes": {axis.key: axis.plain() for axis in op.space.axes},
                    "archs": list(op.archs),
                    "exact_arch": op.exact_arch,
                    **({"tiles": op.tiles.plain()} if op.tiles is not None else {}),
                }
                for op in self.config.ops.values()
            },
            "modules": modules,
        }
