# SPDX-License-Identifier: Apache-2.0
"""Tables of measured choices, which `precast tune gemm` writes and PRECAST_GEMM_TABLE names.

A table is JSON: ``schema``, ``op``, the GPU it was measured on as ``gpu`` and ``sms``, and a list
``choices`` of ``kind``, ``groups``, ``m``, ``n``, ``k``, ``operands``, the ``choice`` by its name
and its ``us``.
It counts for GPUs with as many multiprocessors.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from precast._base.env import GEMM_TABLE
from precast._base.errors import EnvironmentVariableError
from precast._plan.gemm_model import FAMILIES, OPERANDS, Choice, Problem, by_name

SCHEMA, OP = 2, "gemm"
_FIX = "Fix: write it again with `precast tune gemm`, or unset PRECAST_GEMM_TABLE"


class Shape(NamedTuple):
    """A product: ``m`` tokens of a group as the call expects them, or of all contiguous groups."""

    kind: str
    groups: int
    m: int
    n: int
    k: int
    operands: str = OPERANDS

    def __str__(self) -> str:
        groups = "" if self.kind == "plain" else f" groups={self.groups} kind={self.kind}"
        operands = "" if self.operands == OPERANDS else f" operands={self.operands}"
        return f"m={self.m} n={self.n} k={self.k}{groups}{operands}"

    def problem(self, sms: int) -> Problem:
        """What the model gets: it does not count the weights of contiguous groups."""
        groups = 1 if self.kind == "contiguous" else self.groups
        return Problem(self.kind, groups, self.m, self.n, self.k, sms)


class Table(NamedTuple):
    """The choices of a file by shape."""

    path: Path
    gpu: str
    sms: int
    choices: Mapping[Shape, Choice]
    #: The first digits of the file's SHA-256, by which ranks can be compared.
    digest: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {len(self.choices)} shapes, measured on {self.gpu} with {self.sms} "
            f"multiprocessors, sha256 {self.digest}"
        )


def current() -> Table | None:
    """The table that PRECAST_GEMM_TABLE names, or None where it is not set.

    Raises
    ------
    EnvironmentVariableError
        If the file cannot be read, or is no table of choices that exist and are legal.
    """
    path = GEMM_TABLE()
    return _read(path) if path else None


@functools.lru_cache(maxsize=4)
def _read(name: str) -> Table:
    path = Path(name).expanduser()
    try:
        data = path.read_bytes()
        found = json.loads(data)
    except (OSError, ValueError) as error:
        raise _wrong(name, f"cannot be read: {error}") from error
    if not isinstance(found, dict) or (found.get("schema"), found.get("op")) != (SCHEMA, OP):
        raise _wrong(name, f"is not a table of {OP} with schema {SCHEMA}")
    gpu, sms, rows = (found.get(key) for key in ("gpu", "sms", "choices"))
    if not isinstance(gpu, str) or not isinstance(sms, int) or not isinstance(rows, list):
        raise _wrong(name, "must have gpu (a text), sms (an integer) and choices (a list)")
    choices: dict[Shape, Choice] = {}
    for number, row in enumerate(rows):
        shape, choice = _row(name, number, row)
        if shape in choices:
            raise _wrong(name, f"choices[{number}] has the shape of another one: {shape}")
        choices[shape] = choice
    return Table(path, gpu, sms, choices, hashlib.sha256(data).hexdigest()[:12])


def _row(name: str, number: int, row: Any) -> tuple[Shape, Choice]:
    given = row if isinstance(row, dict) else {}
    shape = Shape(*(given.get(key) for key in Shape._fields))  # type: ignore[arg-type]
    family = FAMILIES.get(shape.operands) if isinstance(shape.operands, str) else None
    if family is None:
        legal = f"operands ({', '.join(FAMILIES)})"
        raise _wrong(name, f"choices[{number}] must have {legal}, got {row!r}")
    if shape.kind not in family.kinds or not all(map(_is_count, shape[1:5])):
        legal = f"kind ({', '.join(family.kinds)}) and positive integers groups, m, n and k"
        raise _wrong(name, f"choices[{number}] must have {legal}, got {row!r}")
    known = by_name(shape.operands)
    choice = known.get(str(given.get("choice")))
    if choice is None or not choice.is_legal(shape.kind):
        legal = ", ".join(c.name for c in known.values() if c.is_legal(shape.kind))
        raise _wrong(
            name, f"choices[{number}]: choice {given.get('choice')!r} is unknown; legal: {legal}"
        )
    return shape, choice


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _wrong(name: str, what: str) -> EnvironmentVariableError:
    return EnvironmentVariableError(f"{GEMM_TABLE.name}={name}: {what}. {_FIX}")


def write(path: Path, gpu: str, sms: int, choices: Iterable[Mapping[str, Any]]) -> None:
    """Write a table; each choice is a row as above."""
    data = {"schema": SCHEMA, "op": OP, "gpu": gpu, "sms": sms, "choices": list(choices)}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
