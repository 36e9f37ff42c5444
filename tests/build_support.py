# SPDX-License-Identifier: Apache-2.0
"""The modules that the build and load layers look at: built once by CMake, then kept.

They lie in ``PRECAST_TEST_BUILD_DIR`` (default: ``build/test-modules``); Ninja brings them up to
date at the next run, so that only what changed is compiled again. ``PRECAST_TEST_WHEEL`` names a
wheel of modules of one target, in profile ``core``, that tests/load looks at instead.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import filelock
import pytest

from precast._jit import cute_dsl
from precast._jit.hermetic import launcher
from precast._jit.toolchain import Toolchain, find_toolchain
from precast._plan.planner import Plan
from precast._plan.spec import ModuleSpec
from precast._runtime.manifest import Manifest, read_manifest

ROOT = Path(__file__).resolve().parents[1]
WHEEL = Path(os.environ["PRECAST_TEST_WHEEL"]) if os.environ.get("PRECAST_TEST_WHEEL") else None
PROFILE = "core" if WHEEL else "ci"
#: At night tests run on all of what other runs see a sample of.
EVERYTHING = bool(os.environ.get("TEST_ALL"))
#: The bindings are the same objects for every target. Kernels for other ones are compiled as a
#: sample in tests/build/test_space.py, and by NVRTC in test_headers.py, each op for one target in
#: turn.
ARCHS = "8.0 9.0a" if EVERYTHING else "9.0a"
#: Whose bindings of all-reduce are called: all targets link the same objects.
TARGET = "sm90a"
if WHEEL:
    TARGET = ARCHS = WHEEL.name.split("-")[0].rpartition("_")[2]
PACKAGE = "precast_jit_cache"

T = TypeVar("T")

PLAN = Plan.load(ROOT)
OPS = sorted(PLAN.config.ops)


@dataclass(frozen=True)
class Built:
    """One build of the ``ci`` profile by CMake."""

    tree: Path
    provider: Path
    toolchain: Toolchain
    specs: tuple[ModuleSpec, ...]
    manifest: Manifest

    def library(self, spec: ModuleSpec) -> Path:
        return self.provider / spec.file_name


def planned(profile: str = PROFILE, archs: str = ARCHS) -> list[ModuleSpec]:
    """What a build has; where CuTe DSL is not installed, less than the plan."""
    modules = PLAN.modules(profile, PLAN.archs(archs), find_toolchain().toolkit.major)
    return cute_dsl.buildable(modules)[0]


#: The same as ids of parametrized tests, which are made before anything is built.
CI_MODULES, LEFT_OUT = (
    [spec.file_name for spec in specs]
    for specs in cute_dsl.buildable(PLAN.modules(PROFILE, PLAN.archs(ARCHS)))
)


def some(cases: Iterable[T], one_of: int = 3) -> list[T]:
    """A third of the cases, or another part, always the same; at night all of them."""
    return [*cases][:: 1 if EVERYTHING else one_of]


def quick(toolchain: Toolchain) -> list[str]:
    """Flags for code that nobody runs: optimising it takes most of the time."""
    if EVERYTHING or toolchain.toolkit.version < (13, 0):
        return []
    return ["--Ofast-compile=max"]


def run(argv: Sequence[object], env: Mapping[str, str] | None = None, fails: bool = False) -> str:
    """The output of a command, which must succeed, or must fail."""
    done = subprocess.run(
        [str(word) for word in argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert (done.returncode != 0) == fails, f"{shlex.join(map(str, argv))}\n{done.stdout}"
    return done.stdout


def configure(
    tree: Path,
    env: Mapping[str, str] | None = None,
    fails: bool = False,
    source: Path = ROOT,
    **definitions: str,
) -> str:
    """Configure the project's CMake build in ``tree``."""
    definitions["Python_EXECUTABLE"] = sys.executable
    words = [f"-D{name}={value}" for name, value in definitions.items()]
    return run(["cmake", "-S", source, "-B", tree, "-G", "Ninja", *words], env, fails)


@functools.cache
def _unpack(wheel: Path) -> Built:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    provider = folder / wheel.name.split("-")[0]
    provider.chmod(0o755)
    return Built(folder, provider, find_toolchain(), tuple(planned()), read_manifest(provider))


@functools.cache
def _build() -> Built:
    folder = Path(os.environ.get("PRECAST_TEST_BUILD_DIR") or ROOT / "build" / "test-modules")
    folder.mkdir(parents=True, exist_ok=True)
    tree, prefix = folder / "tree", folder / "prefix"
    provider, specs = prefix / PACKAGE, planned()
    with filelock.FileLock(folder / ".lock"):
        try:
            configure(tree, PRECAST_PROFILE=PROFILE, PRECAST_CUDA_ARCH_LIST=ARCHS)
        except AssertionError:  # Left by another CMake or toolkit.
            shutil.rmtree(tree, ignore_errors=True)
            configure(tree, PRECAST_PROFILE=PROFILE, PRECAST_CUDA_ARCH_LIST=ARCHS)
        run(["cmake", "--build", tree])
        if not _is_installed(tree, provider, specs):
            shutil.rmtree(prefix, ignore_errors=True)
            run(["cmake", "--install", tree, "--prefix", prefix, "--strip"])
        manifest = read_manifest(provider)
    return Built(tree, provider, find_toolchain(), tuple(specs), manifest)


def _is_installed(tree: Path, provider: Path, specs: Sequence[ModuleSpec]) -> bool:
    """Whether a new install would change nothing; other processes may be reading this one."""
    try:
        rows = {(row.file, row.fingerprint) for row in read_manifest(provider).modules}
        same = [(tree / file).read_bytes() == (provider / file).read_bytes() for file, _ in rows]
    except (OSError, ValueError):
        return False
    return all(same) and rows == {(spec.file_name, spec.fingerprint) for spec in specs}


@pytest.fixture(scope="session")
def built() -> Built:
    """The ``ci`` profile, built and installed by CMake, or what a wheel has."""
    return _unpack(WHEEL) if WHEEL else _build()


def spec_of(built: Built, file_name: str) -> ModuleSpec:
    return next(spec for spec in built.specs if spec.file_name == file_name)


def ninja_commands(tree: Path) -> list[list[str]]:
    """Every compile and link command of a configured tree, without the shell around it."""
    commands = []
    for line in run(["ninja", "-C", tree, "-t", "commands"]).splitlines():
        words = shlex.split(line)
        if words[:2] == [":", "&&"]:
            words = words[2 : words.index("&&", 2)]
        elif words[:1] == ["cd"]:  # a command that CMake does not know the form of
            words = words[3:]
        if words[0] == "sh":
            commands.append(_without_launcher(words))
    return commands


def compile_database(tree: Path) -> list[list[str]]:
    rows = json.loads((tree / "compile_commands.json").read_text())
    return [_without_launcher(shlex.split(row["command"])) for row in rows]


def _without_launcher(words: list[str]) -> list[str]:
    """A command without the script that must come before it."""
    assert words[0] == "sh"
    assert Path(words[1]).read_text() == launcher()
    return words[2:]
