# SPDX-License-Identifier: Apache-2.0
"""The JIT layer: real processes, real compilers where they matter, and no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from jit_support import environment, fake_toolkit, namespace, write_tiny
from wheel_support import core

from precast._jit.toolchain import Toolchain, find_toolchain
from precast.errors import ToolchainError

__all__ = ["cache", "core", "fake", "mounts", "real", "tiny", "toolchain"]


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    try:
        return find_toolchain(cuda_major=13)
    except ToolchainError as error:
        pytest.skip(f"the JIT layer needs a CUDA 13 compiler: {error}")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The sources of a tiny kernel."""
    return write_tiny(tmp_path / "tiny")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def real(toolchain: Toolchain, cache: Path) -> dict[str, str]:
    """The environment of a worker that compiles with the compilers of this machine."""
    return environment(PRECAST_CACHE_DIR=str(cache))


@pytest.fixture
def fake(toolchain: Toolchain, cache: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a worker whose compilers take no time."""
    return environment(PRECAST_CACHE_DIR=str(cache), **fake_toolkit(tmp_path / "fake", toolchain))


@pytest.fixture(scope="session")
def mounts() -> None:
    if namespace() is None:
        pytest.skip("no mount namespaces here: neither as root nor as an ordinary user")
