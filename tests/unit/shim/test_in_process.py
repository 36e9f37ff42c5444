# SPDX-License-Identifier: Apache-2.0
"""precast.flashinfer.install(): the package named flashinfer without a file, in one process."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import precast
from precast.flashinfer import install, uninstall
from precast.shim import MODULES, shim_version


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    before = [*sys.meta_path]
    yield
    uninstall()
    assert sys.meta_path == before
    assert not [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]


def test_names_are_those_of_precast():
    install()
    flashinfer = importlib.import_module("flashinfer")
    assert flashinfer.rmsnorm is precast.rmsnorm
    assert flashinfer.decode.fast_decode_plan is precast.decode.fast_decode_plan
    assert flashinfer.__version__ == shim_version("vllm")
    assert importlib.util.find_spec("flashinfer.cute_dsl") is None
    for path in filter(None, MODULES):
        module = importlib.import_module(f"flashinfer.{path}")
        assert module.__name__ == f"flashinfer.{path}"
    assert Path(importlib.util.find_spec("flashinfer.jit").origin).is_file()


@pytest.mark.parametrize("name", ["flashinfer-python", "flashinfer_python", "FlashInfer.Python"])
def test_the_distribution_is_found_under_each_spelling(name):
    install("sglang")
    assert importlib.metadata.version(name) == shim_version("sglang")
    assert importlib.metadata.requires(name) == [f"precast=={precast.__version__}"]


def test_the_latest_install_counts():
    install("vllm")
    assert importlib.import_module("flashinfer").__version__ == shim_version("vllm")
    install("sglang")
    assert importlib.import_module("flashinfer").__version__ == shim_version("sglang")


def test_nothing_is_left_behind():
    install()
    importlib.import_module("flashinfer.norm")
    uninstall()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flashinfer-python")
    assert importlib.util.find_spec("flashinfer") is None


def test_flashinfer_itself_is_not_hidden(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    with pytest.raises(RuntimeError, match="FlashInfer itself is imported already"):
        install()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="unknown engine 'x'; legal: vllm, sglang"):
        install("x")
