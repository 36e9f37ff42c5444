# SPDX-License-Identifier: Apache-2.0
"""The wheels that several tests of the build layer look at."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from build_support import PROFILE, ROOT, run
from ci_support import script


def pip_wheel(project: Path, out: Path, **env: str) -> Path:
    """Build a wheel with the tools of this environment."""
    run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
        + ["--disable-pip-version-check", "-w", str(out), str(project)],
        env,
    )
    (wheel,) = out.glob("*.whl")
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
    return pip_wheel(ROOT, tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="session")
def sm80(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated distribution of one CUDA major and target."""
    project = tmp_path_factory.mktemp("project")
    name = script("make_provider").make_provider(13, "sm80", project)
    assert name == "precast-jit-cache-cu13-sm80"
    return pip_wheel(project, tmp_path_factory.mktemp("sm80"), PRECAST_PROFILE=PROFILE)
