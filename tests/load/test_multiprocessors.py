# SPDX-License-Identifier: Apache-2.0
"""Run the tests of bindings that ask a GPU for its number of multiprocessors, without a GPU.

A plan asks for it before its last checks. In a process of their own, a library in the place of
libcudart's function answers, whatever torch has opened.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from build_support import Built, run

from precast._base.driver import device_capabilities

FOLDER = Path(__file__).with_name("multiprocessors")


@pytest.mark.skipif(bool(device_capabilities()), reason="kernels would run on host memory")
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_bindings_with_multiprocessors(built: Built, file: str, tmp_path: Path) -> None:
    stub = tmp_path / "multiprocessors.so"
    flags = ["-x", "c", "-shared", "-fPIC", "-o"]
    run([built.toolchain.host_compiler, *flags, stub, FOLDER / "multiprocessors.c"])
    env = {"LD_PRELOAD": str(stub), "PRECAST_TEST_MULTIPROCESSORS": "1"}
    out = run([sys.executable, "-m", "pytest", "-q", FOLDER / file], env)
    assert " passed" in out and " skipped" not in out
