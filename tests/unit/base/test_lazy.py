# SPDX-License-Identifier: Apache-2.0
"""Public names are imported at their first use, and are what an import of all would give."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import precast
import precast.jit
from precast._base import lazy


def output(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", [precast, precast.jit], ids=lambda p: p.__name__)
def test_every_name_of_the_stub_is_what_its_module_holds(package):
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    names = [alias.name for line in lines for alias in line.names]
    assert package.__all__ == names
    assert set(names) <= set(dir(package))
    for line in lines:
        for alias in line.names:
            assert alias.asname == alias.name  # Or type checkers take it for private.
            home = importlib.import_module(line.module)
            assert getattr(package, alias.name) is getattr(home, alias.name)


def test_a_name_becomes_an_attribute_at_its_first_use():
    code = """
import sys, precast
print("rmsnorm" in vars(precast), "precast.norm" in sys.modules)
first = precast.rmsnorm
print(vars(precast)["rmsnorm"] is first, "precast.sampling" in sys.modules)
"""
    assert output(code) == "False False\nTrue False"


@pytest.mark.parametrize("package", [precast, precast.jit], ids=lambda p: p.__name__)
def test_no_public_name_is_that_of_a_submodule(package):
    """Or the import of the submodule would put it in the place of the function."""
    modules = {info.name for info in pkgutil.iter_modules(package.__path__)}
    names = {name for name in package.__all__ if not inspect.ismodule(getattr(package, name))}
    assert names.isdisjoint(modules)


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
