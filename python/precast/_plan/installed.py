# SPDX-License-Identifier: Apache-2.0
"""The plan of the precast that is installed, read once a process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast._plan.places import source_root

if TYPE_CHECKING:
    from precast._plan.planner import Plan


@functools.cache
def plan() -> Plan:
    """The configuration space of the installed sources."""
    from precast._plan.planner import Plan

    return Plan.load(source_root())


@functools.cache
def plan_document() -> dict[str, Any]:
    """The plan as plain data: the ``plan.json`` that the wheel ships, computed in a checkout."""
    shipped = Path(__file__).resolve().parents[1] / "data" / "plan.json"
    if shipped.is_file():
        document: dict[str, Any] = json.loads(shipped.read_bytes())
        return document
    return plan().document
