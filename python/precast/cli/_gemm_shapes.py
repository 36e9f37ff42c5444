# SPDX-License-Identifier: Apache-2.0
"""Sizes of products on a command line or in a file: ``m=64 n=7168 k=2048 groups=8 kind=masked``.

Another word may say what the operands are: ``operands=bf16``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from precast._plan.gemm_model import FAMILIES, OPERANDS
from precast._plan.gemm_table import Shape
from precast.cli._output import UsageError

_SIZES = ("m", "n", "k", "groups")
#: What bindings require: the output has a multiple of so many columns, operands of so many.
_MULTIPLES = {
    "fp8_block": {"n": 8, "k": 16},
    "fp8_row": {"k": 16},
    "bf16": {"k": 8},
}


def shapes(words: Iterable[str], where: str = "") -> list[Shape]:
    """The shapes of a line; a size may be several numbers: ``m=1,16,64``.

    Raises
    ------
    UsageError
        If a word is no ``KEY=VALUE``, a size is missing or not legal, or a kind is unknown.
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in (*_SIZES, "kind", "operands") or key in given:
            legal = "m, n and k, and perhaps groups, kind and operands, each once, as KEY=VALUE"
            raise UsageError(f"{where}{word!r} is not one of {legal}")
        given[key] = value
    missing = [key for key in _SIZES[:3] if key not in given]
    if missing:
        raise UsageError(f"{where}{', '.join(missing)} missing; legal: m=64 n=7168 k=2048")
    operands = given.get("operands", OPERANDS)
    if operands not in FAMILIES:
        raise UsageError(f"{where}unknown operands {operands!r}; legal: {', '.join(FAMILIES)}")
    kinds = FAMILIES[operands].kinds
    kind = given.get("kind", kinds[1] if "groups" in given else "plain")
    if kind not in kinds:
        raise UsageError(f"{where}unknown kind {kind!r}; legal: {', '.join(kinds)}")
    if kind == "plain" and "groups" in given:
        raise UsageError(f"{where}kind=plain has no groups; legal: {', '.join(kinds[1:])}")
    steps = _MULTIPLES[operands]
    sizes = [
        _numbers(key, given.get(key, "1"), steps.get(key, 1), where)
        for key in ("groups", *_SIZES[:3])
    ]
    return [Shape(kind, groups, m, n, k, operands) for groups, m, n, k in itertools.product(*sizes)]


def _numbers(key: str, text: str, step: int, where: str) -> Sequence[int]:
    numbers = [int(word) if is_number(word) else 0 for word in text.split(",")]
    if any(number < 1 or number % step or number >= 2**31 - 512 for number in numbers):
        what = f"positive multiples of {step}" if step > 1 else "positive integers"
        raise UsageError(f"{where}{key}={text}: legal: {what} below 2^31, separated by commas")
    return numbers


def is_number(word: str) -> bool:
    """Whether it is a number of a length that Python reads."""
    return word.isdecimal() and word.isascii() and len(word) < 12


def of_file(name: str, text: str) -> list[Shape]:
    """The shapes of a file: one or more in each line; ``#`` begins a comment."""
    found: dict[Shape, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            found |= dict.fromkeys(shapes(words, f"{name}, line {number}: "))
    if not found:
        raise UsageError(f"{name} has no shape; legal: lines such as m=1,16,64 n=7168 k=2048")
    return [*found]
