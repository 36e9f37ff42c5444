# SPDX-License-Identifier: Apache-2.0
"""Public names are imported at their first use, and are what an import of all would give."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import precast
import precast.jit
from precast._base import lazy


def output(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_public_name_stays_where_a_submodule_has_it_too():
    code = """
import precast.xqa
import precast.xqa as function
from precast.xqa import xqa
print(precast.xqa is xqa is function, callable(xqa))
"""
    assert output(code) == "True True"
    modules = {info.name for info in pkgutil.iter_modules(precast.__path__)}
    names = {n for n in precast.__all__ if not inspect.ismodule(getattr(precast, n))}
    assert names & modules == {"xqa"}, "FlashInfer has no other such name"
    assert inspect.isfunction(precast.xqa)


def test_the_public_loader_is_the_submodule():
    """And not the private module of its name, which precast imports."""
    code = """
import precast
print(precast.loader.__name__, callable(precast.loader.get_function))
print(precast.loader.loader is precast._runtime.loader.loader)
"""
    assert output(code) == "precast.loader True\nTrue"


def test_star_and_submodules_come_too():
    code = """
from precast import *
import precast
print(rmsnorm is precast.norm.rmsnorm, freeze is precast._jit.policy.freeze)
"""
    assert output(code) == "True True"


def test_every_list_of_ops_is_complete():
    """In a process that used none of them."""
    for listing in ("_op.dispatch.kernels", "api_logging.public_api", "trace.registered"):
        module, _, function = listing.rpartition(".")
        code = f"from precast.{module} import {function}; print(len({function}()))"
        held = getattr(importlib.import_module(f"precast.{module}"), function)()
        # Tests of this process may have decorated functions of their own.
        assert 50 < int(output(code)) <= len(held)


def test_torch_compile_traces_the_first_use_of_a_name():
    code = """
import torch, precast
with precast.reference_mode():
    compiled = torch.compile(lambda x: precast.scale(x, 2.0) + 1, fullgraph=True, backend="eager")
    print(compiled(torch.ones(2)).tolist(), "scale" in vars(precast))
"""
    assert output(code) == "[3.0, 3.0] True"


@pytest.mark.parametrize("name", ["rmsnrom", "_rmsnorm", "__wrapped__"])
def test_what_does_not_exist_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'precast' has no attribute '{name}'"):
        getattr(precast, name)
    assert not hasattr(precast.jit, name)


def test_a_module_that_does_not_import_says_why(monkeypatch, tmp_path):
    """Not that the name does not exist."""
    monkeypatch.setattr(lazy, "_packages", [*lazy._packages])
    package = tmp_path / "lazily"
    package.mkdir()
    text = "from precast._base.lazy import lazy_package\n__getattr__, __dir__ = lazy_package({})\n"
    (package / "__init__.py").write_text(text.format("__name__, __file__"))
    (package / "__init__.pyi").write_text("from lazily.broken import op as op\n")
    (package / "broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    lazily = importlib.import_module("lazily")
    for name in ("op", "broken"):
        with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
            getattr(lazily, name)
    sys.modules.pop("lazily")
