# SPDX-License-Identifier: Apache-2.0
"""The unit layer runs without the settings of the machine."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _hermetic(clean_environment: pytest.MonkeyPatch) -> None:
    from precast.jit import policy

    clean_environment.setattr(policy, "_frozen", False)


@pytest.fixture
def world(tmp_path, monkeypatch):
    from loader_support import World

    return World(tmp_path / "world", monkeypatch)
