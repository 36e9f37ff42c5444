# SPDX-License-Identifier: Apache-2.0
"""The unit layer runs without the settings of the machine."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def _hermetic(clean_environment: pytest.MonkeyPatch) -> None:
    from precast._jit import policy

    clean_environment.setattr(policy, "_frozen", False)


@pytest.fixture
def reference_mode() -> Iterator[None]:
    """References in place of kernels, and the same random numbers each time."""
    import torch

    import precast

    torch.manual_seed(0)
    with precast.reference_mode():
        yield


@pytest.fixture
def world(tmp_path, monkeypatch):
    from loader_support import World

    return World(tmp_path / "world", monkeypatch)


@pytest.fixture
def make(tree, tmp_path, monkeypatch, caplog):
    """A factory of specs; the file ``count`` gets a line for every link."""
    caplog.set_level(logging.INFO)
    from compiler_support import TOOLCHAIN, ShellSpec

    from precast._jit import compiler
    from precast._plan.planner import Plan

    monkeypatch.setattr(compiler, "find_toolchain", lambda *args: TOOLCHAIN)
    monkeypatch.setattr(compiler, "build_commands", lambda spec, *where: spec.commands(*where))
    monkeypatch.setattr("precast._jit.toolchain.find_toolchain", lambda *args: TOOLCHAIN)
    base = Plan.load(tree).spec("scale", {"dtype": "f32"}, "9.0")
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}

    def factory(**lines: str) -> ShellSpec:
        return ShellSpec(**fields, count=str(tmp_path / "count"), **lines)

    return factory


@pytest.fixture
def dumps(monkeypatch, tmp_path) -> Callable[[], list[Path]]:
    """Dump what is decorated from now on; the call lists the dumps."""
    from precast import api_logging
    from precast.api_logging import _calls, _destination
    from precast.api_logging._dump import Recorder
    from precast.api_logging.replay import find_dumps

    api_logging.public_api()  # An op that is imported from here on would stay logged.
    monkeypatch.setenv("PRECAST_LOGLEVEL", "10")
    monkeypatch.setenv("PRECAST_LOGDEST", str(tmp_path / "log.txt"))
    monkeypatch.setenv("PRECAST_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setattr(_calls, "_recorder", Recorder())
    monkeypatch.setattr(api_logging, "_public", dict(api_logging._public))
    _destination.close()
    yield lambda: find_dumps(tmp_path / "dumps") if (tmp_path / "dumps").exists() else []
    _destination.close()


@pytest.fixture
def ops(dumps) -> ModuleType:
    """``logged_ops``, decorated at level 10."""
    sys.modules.pop("logged_ops", None)
    yield importlib.import_module("logged_ops")
    del sys.modules["logged_ops"]
