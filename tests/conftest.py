# SPDX-License-Identifier: Apache-2.0
"""Fixtures of every layer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from run_times import pytest_addoption, pytest_terminal_summary

from precast._plan.places import SOURCE_FOLDERS

__all__ = ["clean_environment", "pytest_addoption", "pytest_terminal_summary", "tree"]

ROOT = Path(__file__).resolve().parents[1]

#: What the code asks of its surroundings besides ``PRECAST_*``.
FOREIGN = ("MAX_JOBS", "CXX", "CUDA_HOME", "CUDA_PATH", "XDG_CACHE_HOME")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No setting of the machine that runs the tests, and a cache directory of the test's own."""
    import os

    for name in [*os.environ]:
        if name.startswith("PRECAST_") or name in FOREIGN:
            monkeypatch.delenv(name)
    monkeypatch.setenv("PRECAST_CACHE_DIR", str(tmp_path / "cache"))
    return monkeypatch


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the planner reads, to be changed at will."""
    root = tmp_path / "tree"
    for folder in SOURCE_FOLDERS:
        shutil.copytree(ROOT / folder, root / folder)
    return root
