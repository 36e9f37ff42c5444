# SPDX-License-Identifier: Apache-2.0
"""Which prebuilt modules suit a machine: the target of each GPU, and one CUDA major for it."""

from __future__ import annotations

import functools
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from precast._base import env as _env
from precast._base.names import provider_extra, provider_name
from precast._plan.install_hint import FROM_A_FOLDER, modules_command, names_its_wheels
from precast.cli import _state
from precast.cli._output import UnableError, UsageError

if TYPE_CHECKING:
    from precast._plan.config import Arch

#: Machines that cache wheels are built for.
MACHINES = ("x86_64", "aarch64")


class Machine(NamedTuple):
    """Facts that decide about a CUDA major; None if unknown or missing."""

    driver: tuple[int, int] | None
    torch_cuda: str | None

    @property
    def torch_major(self) -> int | None:
        return None if self.torch_cuda is None else int(self.torch_cuda.partition(".")[0])


class Choice(NamedTuple):
    """The modules for one compute capability."""

    capability: str
    arch: str
    cuda_major: int
    reason: str

    @property
    def extra(self) -> str:
        """The extra of precast that installs them, such as ``cu13-sm90a``."""
        return provider_extra(self.cuda_major, self.arch)

    @property
    def distribution(self) -> str:
        return provider_name(self.cuda_major, self.arch)


def this_machine() -> Machine:
    from precast._base.driver import driver_cuda_version
    from precast.cli._environment import torch

    return Machine(driver_cuda_version(), torch(has_gpu=False).get("cuda"))


def suitable_majors(machine: Machine, least: int) -> list[int]:
    """List CUDA majors from ``least`` on that the driver runs: torch's own first, then the newest.

    With torch's major the environment needs no second CUDA runtime.
    """
    from precast._plan.installed import plan

    newest = None if machine.driver is None else machine.driver[0]
    majors = [m for m in plan().build.cuda if m >= least and (newest is None or m <= newest)]
    return sorted(majors, key=lambda major: (major != machine.torch_major, -major))


def choices(capability: str, machine: Machine, wanted: int | None = None) -> list[Choice]:
    """Choose the modules for a GPU of ``capability``; ``wanted`` is a CUDA major to take.

    There is usually one choice, and several if an op exists for another target that serves the GPU.

    Raises
    ------
    UnableError
        If there are none: the GPU is not known, or the driver is too old.
    UsageError
        If there are no modules of the CUDA major ``wanted``.
    """
    from precast._base.version import __version__
    from precast._plan.installed import plan

    build = plan().build
    if not build.accepted(capability):
        raise UnableError(
            f"no modules are built for compute capability {capability}; precast {__version__} "
            f"knows {', '.join(build.capabilities)}. Fix: use another GPU, or a release of precast "
            f"that knows this one"
        )
    archs = {plan().target(op, capability) for op, _ in plan().aot_axes(_env.PROFILE.default)}
    return [
        _choice(capability, arch, machine, wanted)
        for arch in sorted(archs, key=lambda arch: -arch.number)
    ]


def _choice(capability: str, arch: Arch, machine: Machine, wanted: int | None) -> Choice:
    from precast._plan.installed import plan

    rows = {major: row for major, row in plan().build.cuda.items() if major >= arch.cuda[0]}
    driver = "" if machine.driver is None else f"CUDA {machine.driver[0]}.{machine.driver[1]}"
    majors = suitable_majors(machine, arch.cuda[0])
    if wanted is None and majors:
        return Choice(capability, arch.name, majors[0], _why(majors[0], machine))
    if wanted is None:
        oldest = rows[min(rows)]
        raise UnableError(
            f"modules for {arch.name} need driver >= {oldest.min_driver} (CUDA {oldest.major}); "
            f"this driver runs {driver}. Fix: update the driver"
        )
    if wanted not in rows:
        legal = ", ".join(map(str, rows))
        raise UsageError(
            f"--cuda {wanted}: no such modules exist for {arch.name}; legal: {legal}. Fix: "
            f"precast install --cuda {max(rows)}"
        )
    if wanted not in majors:
        instead = f", or: precast install --cuda {majors[0]}" if majors else ""
        raise UnableError(
            f"--cuda {wanted} needs driver >= {rows[wanted].min_driver}; this driver runs "
            f"{driver}. Fix: update the driver{instead}"
        )
    return Choice(capability, arch.name, wanted, f"CUDA {wanted} was requested")


def _why(major: int, machine: Machine) -> str:
    if major == machine.torch_major:
        return f"CUDA {major} is torch's"
    if machine.driver is None:
        return f"CUDA {major} is the newest"
    return f"CUDA {major} is the newest that the driver runs"


@functools.cache
def platform_problem(any_libc: bool = False) -> str | None:
    """Why no wheel of modules installs here, or None; ``any_libc`` ignores the C library."""
    from packaging.tags import platform_tags

    from precast.bundle import this_target
    from precast.cli._machine import libc

    source = "build them on this machine from a checkout: pip install ./python/precast_jit_cache"
    if sys.platform != "linux":
        return f"modules are built for Linux, this is {sys.platform}. Fix: use a Linux machine"
    if platform.machine() not in MACHINES:
        return (
            f"no wheels are made for {platform.machine()}, only for {', '.join(MACHINES)}. Fix: "
            f"{source}"
        )
    tag = this_target().platform
    if not any_libc and tag not in set(platform_tags()):
        return f"wheels are made for {tag}, this machine has {libc()}. Fix: {source}"
    return None


def fits_already(capability: str, wanted: int | None = None) -> bool:
    """Whether every module of the core profile is prebuilt for exactly its target already."""
    from precast._plan.installed import plan
    from precast._runtime.loader import loader

    rows = _state.profile_outcomes(_env.PROFILE.default, [capability])
    rows = [row for row in rows if row.state != "unsupported"]
    majors = {p.root: p.manifest.cuda_major for p in loader.providers if p.manifest is not None}
    return bool(rows) and all(
        row.state == "prebuilt"
        and row.path is not None
        and row.arch == plan().target(row.op, capability).name
        and wanted in (None, majors.get(Path(row.path).parents[1]))
        for row in rows
    )


def folder_hint(commands: Iterable[str]) -> str | None:
    """What to print below commands that need an index with the wheels of precast."""
    if all(names_its_wheels(command) for command in commands if '"precast[cu' in command):
        return None
    return f"With wheels in a folder, such as the wheels/ of a bundle: {FROM_A_FOLDER}"


def fixes(rows: Iterable[_state.Outcome]) -> list[str]:
    """The commands that make every row prebuilt, fewest first: usually one ``pip install``."""
    from precast._plan.installed import plan
    from precast._runtime.loader import loader

    commands: list[str] = []
    targets: dict[tuple[int, str], str] = {}
    for row in rows:
        if row.state in ("prebuilt", "unsupported"):
            continue
        named = [
            match[1]
            for step in row.steps
            if not step.accepted and step.place.endswith(".so")
            if (match := re.search(r"Fix: (.+)", step.reason))
        ]
        known = plan().build.archs.get(row.arch)
        if named:
            commands += named[:1]
        elif known is None or row.module not in loader.document["modules"]:
            commands.append('pip install "precast[jit]"')
        else:
            majors = suitable_majors(this_machine(), known.cuda[0])
            targets[majors[0] if majors else max(plan().build.cuda), row.arch] = known.target
    if targets:
        commands.insert(0, modules_command(targets))
    return list(dict.fromkeys(commands))
