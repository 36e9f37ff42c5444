# SPDX-License-Identifier: Apache-2.0
"""Every built module opens on a machine without a GPU and answers through the real FFI."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from build_support import CI_MODULES, PLAN, Built, run, spec_of

import precast
from precast._base.shared_object import EXPORT_PREFIX
from precast._op.dispatch import kernels
from precast._runtime import elf
from precast._runtime.library import get_function, load_library
from precast._runtime.manifest_writer import SYSTEM_LIBRARIES

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "u8": torch.uint8,
}
# Exports take the two tensors of a pair one by one; messages name what the public function takes.
PUBLIC_NAMES = {"k_cache": r"paged_kv_cache\[0\]"}
# What calculates on the CPU takes its tensors.
ON_HOST = {"workspace_size"}
CASES = [
    (file_name, export)
    for file_name in CI_MODULES
    for export in PLAN.config.op(Path(file_name).stem.split("__")[0]).exports
]


def _function(built: Built, file_name: str, export: str) -> Any:
    spec = spec_of(built, file_name)
    return get_function(load_library(built.library(spec), spec.cuda_major), export)


def _types(export: str) -> list[tuple[str, str]]:
    """Type and name of each argument, from the schema: ``("Tensor", "input")``."""
    arguments = kernels()[export].schema.partition("(")[2].rpartition(") ->")[0]
    words = [text.split() for text in arguments.split(", ")]
    return [(re.sub(r"\(.*\)", "", kind), name) for kind, name in words]


def _arguments(export: str, dtype: torch.dtype, *shape: int) -> list[Any]:
    values = {"float": 1e-6, "bool": True, "int": 64, "SymInt": 4, "Tensor?": None}
    return [
        torch.zeros(shape, dtype=dtype) if kind.startswith("Tensor") else values[kind]
        for kind, _ in _types(export)
    ]


def test_every_export_has_a_kernel() -> None:
    assert precast.__version__
    assert {kernel.export for kernel in kernels().values()} == {
        export for op in PLAN.config.ops.values() for export in op.exports
    }


@pytest.mark.parametrize(
    ("file_name", "export"), [case for case in CASES if case[1] not in ON_HOST]
)
def test_cpu_tensor_is_rejected(built: Built, file_name: str, export: str) -> None:
    function = _function(built, file_name, export)
    # An op without the axis takes any dtype.
    dtype = DTYPES[str(spec_of(built, file_name).axes.get("dtype", "f16"))]
    first = next(n for kind, n in _types(export) if kind == "Tensor" and n != "block")
    arguments = _arguments(export, dtype, 4, 64)
    # Where several public functions share an export, it says its own name.
    name = f"({kernels()[export].function}|{export})"
    first = PUBLIC_NAMES.get(first, first)
    with pytest.raises(ValueError, match=rf"{name}: {first} must be a CUDA tensor, got cpu"):
        function(*arguments)
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            assert not argument.any()


@pytest.mark.parametrize(("file_name", "export"), CASES)
def test_the_example_shows_an_error_of_every_function(
    built: Built, file_name: str, export: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PLAN.root / "examples"))
    from ffi_check import error_of

    spec = spec_of(built, file_name)
    module = load_library(built.library(spec), spec.cuda_major)
    reason = "must be int64, got float32" if export in ON_HOST else "must be a CUDA tensor, got cpu"
    assert reason in error_of(module, export)


@pytest.mark.parametrize(("file_name", "export"), CASES)
def test_wrong_calls_are_type_errors(built: Built, file_name: str, export: str) -> None:
    function = _function(built, file_name, export)
    arguments = _arguments(export, torch.float16, 4, 64)
    with pytest.raises(TypeError, match="Mismatched number of arguments"):
        function(*arguments[:-1])
    with pytest.raises(TypeError, match="Mismatched number of arguments"):
        function(*arguments, 1)
    with pytest.raises(TypeError, match="Mismatched type on argument #0"):
        function("a string", *arguments[1:])


@pytest.mark.parametrize("file_name", CI_MODULES)
def test_unknown_function_is_named(built: Built, file_name: str) -> None:
    with pytest.raises(precast.errors.LoadError, match="no_such_function"):
        _function(built, file_name, "no_such_function")


@pytest.mark.parametrize("file_name", CI_MODULES)
def test_only_entry_points_are_exported(built: Built, file_name: str) -> None:
    """By binutils, not by the reader that wrote the manifest."""
    spec = spec_of(built, file_name)
    rows = [line.split() for line in run(["nm", "-D", built.library(spec)]).splitlines()]
    defined = {row[-1] for row in rows if row[-2] not in ("U", "w", "v")}
    assert defined == {EXPORT_PREFIX + export for export in spec.exports}
    assert not [row for row in rows if row[-2] == "u"], "GNU_UNIQUE symbols"


@pytest.mark.parametrize("file_name", CI_MODULES)
def test_needed_libraries(built: Built, file_name: str) -> None:
    spec = spec_of(built, file_name)
    out = run(["readelf", "-d", built.library(spec)])
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", out))
    assert {spec.cudart, "libtvm_ffi.so"} <= needed
    assert needed <= {spec.cudart, "libtvm_ffi.so", *SYSTEM_LIBRARIES}
    assert "RPATH" not in out
    assert "RUNPATH" not in out
    assert set(elf.read_symbols(built.library(spec)).needed) == needed


@pytest.mark.parametrize("file_name", CI_MODULES)
def test_no_machine_path_is_inside(built: Built, file_name: str) -> None:
    data = built.library(spec_of(built, file_name)).read_bytes()
    for folder in (Path(torch.__file__).parents[1], PLAN.root, built.tree):
        assert str(folder).encode() not in data
