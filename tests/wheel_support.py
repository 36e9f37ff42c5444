# SPDX-License-Identifier: Apache-2.0
"""The wheels that several tests look at. Each is built once, whatever number of workers there is.

Wheels of modules are built from a copy of the checkout whose profile ``ci`` has two ops: what the
tests show of a wheel does not depend on how many modules it has. That every module of the real
profile compiles and passes the checks of a wheel is shown with those of ``build_support``.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest
from build_support import PROFILE, ROOT, run

from precast._plan.planner import Plan

#: An op with an axis and one without; both compile soon.
SMALL_OPS = ("concat_ops", "scale")
#: What wheels are built from.
FOLDERS = ("aot_configs", "ci", "csrc", "include", "python")
FILES = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder that ``make`` fills; the first worker of a run makes it, the others wait."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, done = base / name, base / f"{name}.done"
    with filelock.FileLock(base / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def pip_wheel(project: Path, out: Path, **env: str) -> None:
    """Build a wheel with the tools of this environment."""
    run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
        + ["--disable-pip-version-check", "-w", str(out), str(project)],
        env,
    )


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def respoil(wheel: Path, folder: Path, name: str, data: bytes | None) -> Path:
    """A copy of ``wheel`` in which one file has other contents, or is gone."""
    spoilt = folder / wheel.name
    hit = False
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(spoilt, "w") as new:
        for item in old.namelist():
            if item.endswith(name):
                hit = True
                if data is not None:
                    new.writestr(item, data)
            else:
                new.writestr(item, old.read(item))
    assert hit
    return spoilt


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel ``precast`` of this checkout."""
    return wheel_in(once(tmp_path_factory, "core", lambda out: pip_wheel(ROOT, out)))


# -- from the small checkout ----------------------------------------------------------------------


def _copy_checkout(copy: Path) -> None:
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, copy)
    for path in (copy / "aot_configs").glob("*.toml"):
        if path.stem not in (*SMALL_OPS, "build"):
            text = path.read_text()
            # The profile core includes the profile ci, so nothing else changes.
            small = text.replace('["ci", "core"]', '["core"]').replace('["ci"]', '["core"]')
            assert small != text
            path.write_text(small)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout whose profile ``ci`` has only ``SMALL_OPS``."""
    return once(tmp_path_factory, "checkout", _copy_checkout)


@pytest.fixture(scope="session")
def small_plan(checkout: Path) -> Plan:
    plan = Plan.load(checkout)
    assert {op for op, _ in plan.aot_axes(PROFILE)} == {*SMALL_OPS}
    return plan


@pytest.fixture(scope="session")
def small_core(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel ``precast`` that fits the small wheels of modules."""
    return wheel_in(once(tmp_path_factory, "small_core", lambda out: pip_wheel(checkout, out)))


@pytest.fixture(scope="session")
def sm80(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated distribution of one CUDA major and target."""

    def make(out: Path) -> None:
        maker, project = checkout / "ci" / "make_provider.py", out / "project"
        name = run([sys.executable, maker, "--cuda", "13", "--arch", "sm80", "-o", project])
        assert name == "precast-jit-cache-cu13-sm80\n"
        pip_wheel(project, out, PRECAST_PROFILE=PROFILE)

    return wheel_in(once(tmp_path_factory, "sm80", make))


@pytest.fixture(scope="session")
def modules(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution that the template itself makes, here for one target."""

    def make(out: Path) -> None:
        project = checkout / "python" / "precast_jit_cache"
        pip_wheel(project, out, PRECAST_CUDA_ARCH_LIST="9.0a", PRECAST_PROFILE=PROFILE)

    return wheel_in(once(tmp_path_factory, "modules", make))
