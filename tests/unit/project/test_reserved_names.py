# SPDX-License-Identifier: Apache-2.0
"""Names of distributions that errors tell users to install are reserved before a release."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from precast._base.names import provider_name
from precast._plan.planner import Plan

ROOT = Path(__file__).resolve().parents[3]
BUILD = Plan.load(ROOT).config.build


def reserve(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the step with an environment of its own, without tokens."""
    return subprocess.run(
        [ROOT / "ci" / "publish.sh", "reserve", *options],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """A python3 that writes its arguments down in place of build and twine."""
    fake = tmp_path / "python3"
    fake.write_text(
        f'#!/bin/sh\ncase "$1" in -m) echo "$@" >> {tmp_path}/calls; '
        f'[ "$2" != build ] || {{ mkdir -p "$5"; : > "$5/$(basename "$6").whl"; }};; '
        f'*) exec {sys.executable} "$@";; esac\n'
    )
    fake.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}


def test_without_an_option_the_names_are_only_listed(tools: dict[str, str]) -> None:
    done = reserve(**tools)
    assert done.returncode == 0, done.stderr
    assert "nothing was uploaded" in done.stderr
    assert not Path(tools["CALLS"]).exists()
    names = done.stdout.split()
    assert names[:2] == ["precast", "precast-jit-cache"]
    every = {provider_name(major, arch) for major in BUILD.cuda for arch in BUILD.archs}
    assert set(names[2:]) <= every
    for arch in BUILD.archs:
        assert provider_name(BUILD.newest_cuda, arch) in names


def test_every_name_is_built_and_uploaded_once(tools: dict[str, str]) -> None:
    names = reserve(**tools).stdout.split()
    done = reserve("--upload", **tools)
    assert done.returncode == 0, done.stderr
    calls = Path(tools["CALLS"]).read_text().splitlines()
    built = [Path(line).name for line in calls if line.startswith("-m build ")]
    uploaded = [Path(line).stem for line in calls if line.startswith("-m twine upload ")]
    assert built == names
    assert sorted(uploaded) == sorted(names)


def test_another_option_is_a_usage_error(tools: dict[str, str]) -> None:
    assert reserve("--now", **tools).returncode == 2
