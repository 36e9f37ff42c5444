# SPDX-License-Identifier: Apache-2.0
"""Public names are imported at their first use, and are what an import of all would give."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import precast
import precast.jit


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
