# SPDX-License-Identifier: Apache-2.0
"""The backends of ops whose kernel exists in CUDA and in CuTe DSL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from precast.errors import MissingKernelError

BACKENDS = ("cuda", "cute_dsl")


def usable(op: Any, backend: str, call: Callable[[], object]) -> str:
    """``backend``, if this GPU has it, and if it is prebuilt here or can be compiled; else skip."""
    major, minor = torch.cuda.get_device_capability()
    if not op.is_backend_supported(backend, 10 * major + minor):
        pytest.skip(f"no kernel of {backend} for this GPU")
    try:
        call()
    except MissingKernelError as error:
        if backend == "cuda":
            raise
        pytest.skip(f"neither prebuilt nor compiled here: {error}")
    return backend
