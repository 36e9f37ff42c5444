# SPDX-License-Identifier: Apache-2.0
"""The gpu layer: skipped without a CUDA device, never run in reference mode."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "jit: compiles kernels; needs nvcc and PRECAST_JIT=auto")
    config.addinivalue_line("markers", "alone: times a GPU, fills its memory, or needs several")


def pytest_report_header() -> list[str]:
    import precast
    from precast._runtime.loader import loader

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    providers = ", ".join(provider.label for provider in loader.providers) or "none"
    return [f"gpu: {device}; precast: {Path(precast.__file__).parent}; providers: {providers}"]


@pytest.hookimpl(tryfirst=True)  # before -m reads the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, _, parts = os.environ.get("PRECAST_TEST_SHARD", "").partition("/")
    if parts:  # "2/8": the third of eight parts, for as many processes
        config.hook.pytest_deselected(
            items=[item for i, item in enumerate(items) if i % int(parts) != int(part)]
        )
        items[:] = items[int(part) :: int(parts)]
    for item in items:
        if not Path(item.path).is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        if "free_memory" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.alone)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.fixture(autouse=True, scope="session")
def _kernels_not_references() -> None:
    from precast._op.mode import is_reference

    assert not is_reference(), "unset PRECAST_REFERENCE: the gpu tests are about the kernels"


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh random inputs; a failing test shows the seed, ``PRECAST_TEST_SEED`` sets it."""
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    return torch.Generator("cuda").manual_seed(seed)


@pytest.fixture
def free_memory() -> Iterator[None]:
    """For tests that fill the GPU: give back what earlier tests cached, and what they took."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()
