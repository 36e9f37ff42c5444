# SPDX-License-Identifier: Apache-2.0
"""The name of a module; the planner, the loader and the command line all take it from here."""

from __future__ import annotations

from collections.abc import Mapping


def module_name(op: str, axes: Mapping[str, object]) -> str:
    """The op and its axes in declared order: ``norm__dtype_bf16``."""
    return "__".join([op, *(f"{axis}_{axis_word(value)}" for axis, value in axes.items())])


def axis_word(value: object) -> str:
    """An axis value as names and macros spell it; booleans are 0 and 1."""
    return str(int(value)) if isinstance(value, bool) else str(value)
