# SPDX-License-Identifier: Apache-2.0
"""Ranges of numbers in declarations: ``float(0-)``, ``size(0-9)``, ``float(-)``, a named one."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_RANGE = re.compile(rf"(?P<least>{_NUMBER})?-(?P<most>{_NUMBER})?\Z")

#: The largest float32: exports round to that.
MOST_FLOAT = (2 - 2**-23) * 2.0**127


class Range(NamedTuple):
    """The numbers from ``least`` to ``most``; NaN is in none."""

    least: float = -math.inf
    most: float = math.inf

    def holds(self, value: Any) -> bool:
        return bool(self.least <= value <= self.most)

    @property
    def words(self) -> str:
        """What errors say of it."""
        if self == NOT_NAN:
            return "a number, not NaN"
        if self == INT64:
            return "a number of 64 bits"
        if self == FINITE:
            return "a finite number"
        if self == POSITIVE:
            return "positive and finite"
        if self.most == math.inf:
            return f"at least {self.least}"
        if self.most == MOST_FLOAT:
            return f"a finite number of at least {self.least:g}"
        return f"from {self.least} to {self.most}"


NOT_NAN = Range()
FINITE = Range(-MOST_FLOAT, MOST_FLOAT)
#: From the least normal float32: exports divide by such a number.
POSITIVE = Range(2.0**-126, MOST_FLOAT)
_NAMED = {"finite": FINITE, "positive": POSITIVE}
#: What exports take for an integer.
INT64 = Range(-(2**63), 2**63 - 1)


def read_range(text: str, is_float: bool) -> Range:
    """The range that a declaration writes; one of float that has a least number is finite."""
    if is_float and text in _NAMED:
        return _NAMED[text]
    match = _RANGE.match(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no range of numbers; legal: 0-, 0-9, - (all but NaN), and of a float "
            f"{', '.join(_NAMED)}"
        )
    number = float if is_float else int
    if match["least"] is None and match["most"] is None:
        return Range()
    least = -math.inf if match["least"] is None else number(match["least"])
    most = math.inf if match["most"] is None else number(match["most"])
    return Range(least, MOST_FLOAT if is_float and most == math.inf else most)
