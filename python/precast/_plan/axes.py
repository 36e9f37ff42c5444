# SPDX-License-Identifier: Apache-2.0
"""The axes of an op, and the configurations that they allow.

A key of ``[axes]`` is one axis, or several axes joined by commas where only some combinations of
their values exist. Only the TOML key is joined: module names, macros and calls name each axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from precast._base.errors import UnsupportedConfigError
from precast._base.names import axis_word

if TYPE_CHECKING:
    from precast._plan.table import Table

AxisValue = str | int | bool


@dataclass(frozen=True)
class Axis:
    """One key of ``[axes]``.

    Attributes
    ----------
    names : tuple of str
        One axis, or those that are joined.
    rows : tuple of tuple
        The legal combinations: one value for each name.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[AxisValue, ...], ...]

    @property
    def key(self) -> str:
        return ",".join(self.names)

    def words(self) -> list[str]:
        """The legal combinations as text: ``f16``, or ``192,128`` of a joint axis."""
        return [row_word(row) for row in self.rows]

    def plain(self) -> list[Any]:
        """The rows as a TOML file holds them: values, or lists of values of a joint axis."""
        return [row[0] if len(self.names) == 1 else list(row) for row in self.rows]


def row_word(row: Sequence[object]) -> str:
    return ",".join(map(axis_word, row))


@dataclass(frozen=True)
class Space:
    """A set of configurations: every combination of the rows of its axes."""

    axes: tuple[Axis, ...] = ()

    @cached_property
    def values(self) -> dict[str, tuple[AxisValue, ...]]:
        """Each single axis, in declared order, with the values that occur in it."""
        return {
            name: tuple(dict.fromkeys(row[i] for row in axis.rows))
            for axis in self.axes
            for i, name in enumerate(axis.names)
        }

    def points(self) -> Iterator[dict[str, AxisValue]]:
        """Every configuration, as a value for each single axis."""
        for rows in itertools.product(*(axis.rows for axis in self.axes)):
            yield {
                name: value
                for axis, row in zip(self.axes, rows)
                for name, value in zip(axis.names, row)
            }

    def offered(self, name: str, given: Mapping[str, str]) -> list[AxisValue]:
        """The values of one axis that go with the words ``given`` for the others."""
        for axis in self.axes:
            if name in axis.names:
                rows = [
                    row
                    for row in axis.rows
                    if all(
                        given.get(other, axis_word(value)) == axis_word(value)
                        for other, value in zip(axis.names, row)
                        if other != name
                    )
                ]
                return list(dict.fromkeys(row[axis.names.index(name)] for row in rows))
        return []

    def checked(self, op: str, values: Mapping[str, object]) -> dict[str, AxisValue]:
        """``values``, which may be words, as legal values of every axis, in declared order.

        Raises
        ------
        UnsupportedConfigError
            If an axis is missing or unknown, or if a value or a combination of values is not legal.
        """
        for name in values:
            if name not in self.values:
                raise UnsupportedConfigError(
                    f"{op} has no axis {name!r}; legal: {', '.join(self.values) or 'none'}"
                )
        checked: dict[str, AxisValue] = {}
        for axis in self.axes:
            for name in axis.names:
                if name not in values:
                    legal = ", ".join(map(axis_word, self.values[name]))
                    raise UnsupportedConfigError(f"{op}: axis {name!r} is missing; legal: {legal}")
            words = axis.words()
            got = row_word([values[name] for name in axis.names])
            if got not in words:
                legal = (", " if len(axis.names) == 1 else " or ").join(words)
                raise UnsupportedConfigError(
                    f"{op}: {axis.key}={got} is not supported; legal: {legal}"
                )
            checked.update(zip(axis.names, axis.rows[words.index(got)]))
        return checked


def read_rows(
    table: Table, key: str, names: tuple[str, ...], legal: Axis | None = None
) -> tuple[tuple[AxisValue, ...], ...]:
    """The value of one key as rows, each once; a subset of those of ``legal`` if it is given."""
    shape = "a non-empty list" if len(names) == 1 else f"a non-empty list of [{', '.join(names)}]"
    if legal is not None:
        shape = f"a subset of {legal.plain()}"
    values = table.data.get(key)
    if values is None:
        raise table.fail(key, "missing", shape)
    if not isinstance(values, list) or not values:
        raise table.fail(key, f"got {values!r}", shape)
    rows: list[tuple[AxisValue, ...]] = []
    for value in values:
        row = tuple(value) if len(names) > 1 and isinstance(value, list) else (value,)
        if len(row) != len(names):
            raise table.fail(key, f"got {value!r}", shape)
        if legal is not None and row not in legal.rows:
            raise table.fail(key, f"{value!r} is outside the axis", legal.plain())
        if row_word(row) in map(row_word, rows):
            raise table.fail(key, f"{value!r} is listed twice", "each value once")
        rows.append(row)
    return tuple(rows)
