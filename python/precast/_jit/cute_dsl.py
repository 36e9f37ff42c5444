# SPDX-License-Identifier: Apache-2.0
"""The compiler of kernels in CuTe DSL: whether this environment has it, and how it is started.

It is a package of Python, ``nvidia-cutlass-dsl``, in the version that ``aot_configs/build.toml``
names. Only builds need it: where it is missing, its modules are left out of a build of many, which
says so, and one that is asked for by name is an error.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from precast._base.errors import ToolchainError
from precast._plan.spec import CUTE_DSL_COMPILER, ModuleSpec

DISTRIBUTION = "nvidia-cutlass-dsl"


def requirement(spec: ModuleSpec) -> str:
    """What pip installs: ``nvidia-cutlass-dsl==4.8.1``."""
    return f"{DISTRIBUTION}=={spec.cute_dsl}"


def problem(spec: ModuleSpec) -> str | None:
    """Why this environment cannot compile the kernels in CuTe DSL of a module, or None."""
    if not spec.is_cute_dsl:
        return None
    version = _installed()
    if version == spec.cute_dsl:
        return None
    found = "is not installed" if version is None else f"{version} is installed, which is another"
    return (
        f"its kernels are in CuTe DSL, which {requirement(spec)} compiles; {DISTRIBUTION} {found}. "
        f'Fix: pip install "{requirement(spec)}", or install the prebuilt modules'
    )


def require(spec: ModuleSpec) -> None:
    """Raise unless :func:`problem` has none.

    Raises
    ------
    ToolchainError
        If the compiler is missing, or has another version.
    """
    why = problem(spec)
    if why is not None:
        raise ToolchainError(f"{spec.name} for {spec.arch.name} cannot be compiled: {why}")


def buildable(specs: Iterable[ModuleSpec]) -> tuple[list[ModuleSpec], list[ModuleSpec]]:
    """The modules that this environment can compile, and those that a build must leave out."""
    kept: list[ModuleSpec] = []
    left_out: list[ModuleSpec] = []
    for spec in specs:
        (kept if problem(spec) is None else left_out).append(spec)
    return kept, left_out


def statement(left_out: Sequence[ModuleSpec]) -> str:
    """What a build says of the modules that it leaves out."""
    first = left_out[0]
    files = ", ".join(spec.file_name for spec in left_out)
    noun = "module is" if len(left_out) == 1 else "modules are"
    version = _installed()
    found = "not installed" if version is None else f"installed as {version}"
    return (
        f"{len(left_out)} {noun} left out of this build, because kernels in CuTe DSL need "
        f"{requirement(first)}, which is {found}: {files}. Fix: pip install "
        f'"{requirement(first)}", and build again'
    )


@functools.cache
def _installed() -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def command(root: Path) -> list[str]:
    """The start of a command that compiles: the interpreter, and where it finds packages.

    The interpreter ignores its environment, as every compiler does here. So it gets the folders
    with ``--site`` that hold the packages, which need not be its own: build tools install them
    into folders of their own.
    """
    sites = [f"--site={folder}" for folder in _sites()]
    return [sys.executable, "-I", str(root / CUTE_DSL_COMPILER), *sites]


@functools.cache
def _sites() -> list[str]:
    """Where the package and all that it requires are installed."""
    folders: dict[str, None] = {}
    todo, seen = [DISTRIBUTION], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # of an extra, or of another platform
            continue
        folders[str(found.locate_file(""))] = None
        for text in found.requires or ():
            match = re.match(r"[A-Za-z0-9._-]+", text)
            if match is not None and "extra ==" not in text:
                todo.append(match[0])
    return sorted(folders)
