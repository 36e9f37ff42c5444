# SPDX-License-Identifier: Apache-2.0
"""The unit layer runs without the settings of the machine."""

from __future__ import annotations

import dataclasses
import logging

import pytest


@pytest.fixture(autouse=True)
def _hermetic(clean_environment: pytest.MonkeyPatch) -> None:
    from precast.jit import policy

    clean_environment.setattr(policy, "_frozen", False)


@pytest.fixture
def world(tmp_path, monkeypatch):
    from loader_support import World

    return World(tmp_path / "world", monkeypatch)


@pytest.fixture
def make(tree, tmp_path, monkeypatch, caplog):
    """A factory of specs; ``COUNT`` gets a line for every link."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    from compiler_support import TOOLCHAIN, ShellSpec

    from precast.jit import compiler
    from precast.jit.planner import Plan

    monkeypatch.setattr(compiler, "find_toolchain", lambda *args: TOOLCHAIN)
    monkeypatch.setattr("precast.jit.toolchain.find_toolchain", lambda *args: TOOLCHAIN)
    base = Plan.load(tree).spec("scale", {"dtype": "f32"}, "9.0")
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}

    def factory(**lines: str) -> ShellSpec:
        return ShellSpec(**fields, **lines)

    return factory
