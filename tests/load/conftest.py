# SPDX-License-Identifier: Apache-2.0
"""The load layer: needs built modules, no GPU."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import build_support
import pytest
from build_support import Built

from precast._base.driver import device_capabilities


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The ``ci`` profile for sm80 and sm90a; without a driver, a GPU has 132 multiprocessors.

    A plan asks for their number before its last checks. What is opened before a module takes the
    place of the function that it would ask.
    """
    made = build_support._build()
    if not device_capabilities():
        source, library = Path(__file__).with_name("multiprocessors.c"), "multiprocessors.so"
        target = tmp_path_factory.mktemp("stub") / library
        compiler = made.toolchain.host_compiler
        flags = ["-x", "c", "-shared", "-fPIC", "-o"]
        build_support.run([compiler, *flags, target, source])
        ctypes.CDLL(str(target), mode=os.RTLD_GLOBAL)
    return made
