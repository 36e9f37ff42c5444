# SPDX-License-Identifier: Apache-2.0
"""A TOML table with checked access: every failure names file, key and what is legal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from precast._base.errors import ConfigError

_RELEASE = re.compile(r"\d+(\.\d+)*(\.post\d+)?\Z")


class Table:
    """One table of a file; ``where`` is its own key."""

    def __init__(self, file: str, data: Mapping[str, Any], where: str = "") -> None:
        self.file, self.data, self.where = file, data, where

    def key(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def fail(self, key: str, problem: str, legal: Iterable[object] | str) -> ConfigError:
        text = legal if isinstance(legal, str) else ", ".join(str(v) for v in legal)
        return ConfigError(f"{self.file}: {self.key(key)}: {problem}; legal: {text}")

    def only(self, *legal: str) -> Table:
        for key in self.data:
            if key not in legal:
                raise self.fail(key, "unknown key", legal)
        return self

    def text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "missing" if value is None else f"got {value!r}", "a string")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self.data.get(key, default)
        if value is None:
            raise self.fail(key, "missing", "a list of strings")
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise self.fail(key, f"got {value!r}", "a list of strings")
        for item in value:
            if list(value).count(item) > 1 and not item.startswith("-"):
                raise self.fail(key, f"{item!r} stands twice", "each value once")
        return tuple(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"got {value!r}", "true or false")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            problem = "missing" if value is None else f"got {value!r}"
            raise self.fail(key, problem, "a whole number of at least 0")
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        values = self.data.get(key)
        if not isinstance(values, list) or not values or not all(type(v) is int for v in values):
            problem = "missing" if values is None else f"got {values!r}"
            raise self.fail(key, problem, "a non-empty list of whole numbers")
        return tuple(values)

    def filled(self, key: str) -> tuple[str, ...]:
        values = self.texts(key)
        if not values:
            raise self.fail(key, "empty", "at least one string")
        return values

    def choices(
        self, key: str, legal: Iterable[str], default: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        legal = list(legal)
        values = self.texts(key, default)
        for value in values:
            if value not in legal:
                raise self.fail(key, f"unknown value {value!r}", legal)
        return values

    def table(self, key: str, required: bool = True) -> Table:
        value = self.data.get(key, None if required else {})
        if not isinstance(value, dict):
            raise self.fail(key, "missing" if value is None else f"got {value!r}", "a table")
        return Table(self.file, value, self.key(key))

    def rows(self, key: str, required: bool = True) -> list[tuple[str, Table]]:
        table = self.table(key, required)
        return [(name, table.table(name)) for name in table.data]

    def blocks(self, key: str) -> list[Table]:
        """The tables of ``[[key]]``, named ``key[0]``, ``key[1]`` and so on; none is legal."""
        rows = self.data.get(key, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self.fail(key, f"got {rows!r}", f"[[{key}]] blocks")
        return [Table(self.file, row, f"{self.key(key)}[{i}]") for i, row in enumerate(rows)]


def read_table(path: Path) -> Table:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    name = f"{path.parent.name}/{path.name}"
    try:
        return Table(name, tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{name}: missing file; legal: a TOML file at that place") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}; legal: UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}; legal: TOML 1.0") from None


def version(table: Table, key: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)", table.text(key))
    if match is None:
        raise table.fail(key, f"got {table.text(key)!r}", "a version such as '12.9'")
    return int(match[1]), int(match[2])


def release(table: Table, key: str) -> str:
    if _RELEASE.match(table.text(key)) is None:
        raise table.fail(key, f"got {table.text(key)!r}", "a version such as '0.1.15'")
    return table.text(key)


def major_key(table: Table, key: str) -> int:
    if not key.isdecimal():
        raise table.fail(key, "unknown CUDA major", "a number such as 13")
    return int(key)
