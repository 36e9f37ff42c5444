# SPDX-License-Identifier: Apache-2.0
"""Users see the paths that they import, not where a function is defined."""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import precast
from precast import errors, quantization
from precast._base.public_name import public_name
from precast.api_logging import public_api

MODULES = sorted(
    info.name for info in pkgutil.iter_modules(precast.__path__) if not info.name.startswith("_")
)


@pytest.mark.parametrize("name", MODULES)
def test_what_a_public_module_exports_has_a_public_name(name):
    module = importlib.import_module(f"precast.{name}")
    for attribute in getattr(module, "__all__", ()):
        value = getattr(module, attribute)
        own = str(getattr(value, "__module__", "")).startswith("precast.")
        if name == "comm" and attribute.endswith("_reference"):  # ``precast`` does not export it.
            continue
        if own and (inspect.isroutine(value) or inspect.isclass(value)):
            found = public_name(value)
            assert not any(part.startswith("_") for part in found.split(".")), attribute
            place, _, last = found.rpartition(".")
            assert getattr(importlib.import_module(place), last) is value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (lambda: precast.rmsnorm, "precast.norm.rmsnorm"),
        (lambda: precast.scale, "precast.scale"),
        (lambda: precast.preload, "precast.preload"),
        (lambda: precast.fi_trace, "precast.trace.fi_trace"),
        (lambda: errors.LoadError, "precast.errors.LoadError"),
        (lambda: quantization.SfLayout, "precast.quantization.SfLayout"),
        (
            lambda: precast.BatchDecodeWithPagedKVCacheWrapper.run,
            "precast.decode.BatchDecodeWithPagedKVCacheWrapper.run",
        ),
    ],
)
def test_names(value, name):
    assert public_name(value()) == name


def test_a_method_of_a_private_base_has_the_name_of_the_public_class():
    plan = precast.BatchDecodeWithPagedKVCacheWrapper.plan
    assert public_name(plan) == "precast.decode.BatchDecodeWithPagedKVCacheWrapper.plan"


def test_what_precast_does_not_export_keeps_its_module():
    class Mine(enum.Enum):
        ONE = 1

    assert public_name(Mine) == f"{__name__}.{Mine.__qualname__}"
    assert public_name(public_name) == "precast._base.public_name.public_name"


def test_every_logged_function_of_the_library_has_a_public_name():
    names = [name for name in public_api() if name.startswith("precast.")]
    assert len(names) > 50
    assert [name for name in names if "._" in name and "__init__" not in name] == []


def test_a_name_does_not_depend_on_what_is_imported():
    code = (
        "from precast._ops.norm.rmsnorm import rmsnorm\n"
        "from precast._base.public_name import public_name\n"
        "import sys; print(public_name(rmsnorm), 'precast.norm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "precast.norm.rmsnorm False\n"
