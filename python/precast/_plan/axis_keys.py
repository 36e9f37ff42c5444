# SPDX-License-Identifier: Apache-2.0
"""The keys of ``[axes]``, which name one axis, or several that are joined by commas.

The loader imports this module at the first call, so it does not import the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def names_of(key: str) -> tuple[str, ...]:
    """The axes of one key: ``("head_dim_qk", "head_dim_vo")`` for a joint one."""
    return tuple(key.split(","))


def in_declared_order(
    declared: Mapping[str, Sequence[Any]], values: Mapping[str, object]
) -> dict[str, Any] | None:
    """``values`` in the order of the plan's ``axes``, or None if they are not legal as they are.

    ``declared`` is what ``plan.json`` says of an op. The loader asks this for every first call, so
    that it reads no TOML file.
    """
    ordered: dict[str, Any] = {}
    for key, rows in declared.items():
        names = names_of(key)
        try:
            row = [values[name] for name in names]
        except KeyError:
            return None
        if (row if len(names) > 1 else row[0]) not in rows:
            return None
        ordered.update(zip(names, row))
    return ordered if len(ordered) == len(values) else None
