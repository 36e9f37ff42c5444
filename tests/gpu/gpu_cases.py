# SPDX-License-Identifier: Apache-2.0
"""Every public operator: the rows of the files ``cases_<op>.py`` beside this one.

``expected`` of a row is the formula in float64 on the values that the kernel gets, independent of
the library's own references.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from op_case import DTYPES, OpCase

__all__ = ["CASES", "DTYPES", "OpCase", "grid", "grid_id"]

CASES: dict[str, OpCase] = {
    case.name: case
    for file in sorted(Path(__file__).parent.glob("cases_*.py"))
    for case in importlib.import_module(file.stem).CASES
}


def grid(**limits: Callable[[OpCase], bool]) -> list[tuple[OpCase, torch.dtype]]:
    """Each operator with each of its dtypes, for ``pytest.mark.parametrize``."""
    keep = limits.get("where", lambda case: True)
    return [(c, DTYPES[word]) for c in CASES.values() if keep(c) for word in c.dtypes]


def grid_id(value: Any) -> str | None:
    """Readable test names."""
    if isinstance(value, OpCase):
        return value.name
    if isinstance(value, torch.dtype):
        return next(word for word, dtype in DTYPES.items() if dtype == value)
    return None
