# SPDX-License-Identifier: Apache-2.0
"""Modules of FlashInfer that are neither prebuilt nor can be compiled here: a skip, no failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Around what FlashInfer may have to compile."""
    try:
        yield
    except FileNotFoundError as error:  # ninja
        pytest.skip(f"FlashInfer cannot compile here: {error}")
    except RuntimeError as error:
        said = str(error).lower()
        if not any(word in said for word in ("ninja", "nvcc", "jit compilation is disabled")):
            raise
        # What the compiler says stands behind the long commands that Ninja repeats.
        reasons = [line for line in str(error).splitlines() if "error" in line.lower()]
        pytest.skip(f"FlashInfer cannot compile here: {(reasons or [str(error)])[-1][-300:]}")
