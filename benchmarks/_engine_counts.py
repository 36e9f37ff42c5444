# SPDX-License-Identifier: Apache-2.0
"""The programs that an engine starts, and the functions of ``flashinfer`` that it calls."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COMPILERS = ("nvcc", "ninja", "cicc", "cudafe++", "ptxas", "gcc", "g++", "cc", "c++", "clang")
#: Methods of wrappers; the names of older versions of FlashInfer are those that SGLang calls.
METHODS = ("plan", "run", "begin_forward", "forward", "forward_return_lse")
Count = Callable[[str], object]


def at_programs(count: Count) -> None:
    """Call ``count`` with the name of each program that this process starts from now on."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
            count(Path(os.fsdecode(arguments[0])).name)
        elif event == "os.system":
            count(os.fsdecode(arguments[0]).split()[0])

    sys.addaudithook(hook)


def at_calls(counted: Mapping[str, tuple[str, ...]], count: Count, options: str) -> None:
    """Call ``count`` with the name of each function or method that an engine calls.

    Parameters
    ----------
    counted : mapping of str to tuple of str
        Names by module of ``flashinfer``: functions, and classes of wrappers.
    count : callable
        Gets ``name`` of a function, and ``class.method`` of a method.
    options : str
        What ``precast shim install`` needs for the engine, for the error.
    """
    flashinfer = importlib.import_module("flashinfer")
    if not hasattr(flashinfer, "__precast__"):
        raise SystemExit(
            f"error: flashinfer is {flashinfer.__file__}, not served by precast. "
            f"Fix: precast shim install {options}"
        )

    def counting(function: Any, name: str) -> Any:
        @functools.wraps(function)
        def counted_call(*args: Any, **options: Any) -> Any:
            count(name)
            return function(*args, **options)

        return counted_call

    for path, names in counted.items():
        module = importlib.import_module(f"flashinfer.{path}".rstrip("."))
        for name in names:
            found = getattr(module, name)
            if isinstance(found, type):
                methods = [(m, getattr(found, m)) for m in METHODS if hasattr(found, m)]
                for method, function in methods:
                    setattr(found, method, counting(function, f"{name}.{method}"))
            else:
                setattr(module, name, counting(found, name))
