# SPDX-License-Identifier: Apache-2.0
"""Load every prebuilt library through the real FFI and call its functions with CPU tensors.

This needs neither a GPU nor a driver: the argument check of the C++ binding refuses the tensors
before anything is launched. So loading, symbols, calling convention and exceptions are known to
work.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from precast._op.dispatch import kernels
from precast._runtime.library import get_function, load_library
from precast._runtime.loader import loader


def check_libraries() -> int:
    """Check all installed libraries, print a line for each function, return how many there were."""
    count = 0
    for provider in loader.providers:
        if provider.manifest is None:
            raise SystemExit(f"{provider.label}: {provider.problem}")
        for row in provider.manifest.modules:
            start = time.perf_counter()
            module = load_library(provider.root / row.file, provider.manifest.cuda_major)
            print(f"  {row.file} loaded in {(time.perf_counter() - start) * 1e3:.1f} ms")
            for export in row.exports:
                print(f"    {error_of(module, export)}")
                count += 1
    if not count:
        raise SystemExit("no prebuilt module is installed. Fix: precast install")
    return count


def error_of(module: Any, export: str) -> str:
    """The error of an exported function for CPU tensors, and the C++ file that raised it.

    A function that computes on the CPU refuses their dtype.
    """
    schema = torch._C.parse_schema(export + kernels()[export].schema)
    values = {
        "Tensor": torch.ones(2, 16),
        "Optional[Tensor]": None,
        "float": 1.0,
        "int": 1,
        "bool": False,
    }
    try:
        get_function(module, export)(*(values[str(a.type)] for a in schema.arguments))
    except ValueError as error:
        # tvm-ffi appends the C++ frames to the Python traceback.
        files = []
        frame = error.__traceback__
        while frame is not None:
            files.append(Path(frame.tb_frame.f_code.co_filename).name)
            frame = frame.tb_next
        place = next((name for name in files if name.endswith((".cc", ".h"))), None)
        if place is None:
            raise
        return f"{place}: {type(error).__name__}: {error}"
    raise SystemExit(f"{export} accepted a wrong tensor")


if __name__ == "__main__":
    print(f"{check_libraries()} functions checked")
