# SPDX-License-Identifier: Apache-2.0
"""Formulas as MathML, which browsers render without a script, a font or a network."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

# Upright text, another command (with its argument if it has one), or a name of our code.
_WORD = re.compile(r"\\mathrm\{(\w+)\}|\\(?:text|begin|end)\{[^}]*\}|\\[a-zA-Z]+|([a-zA-Z]{2,})")


def _words(match: re.Match[str]) -> str:
    """A name as one identifier: ``input``, not a product of five letters."""
    word = match[1] or match[2]
    return rf"\text{{{word}}}" if word else match[0]


def block(latex: str) -> str:
    """A displayed formula; lines that end with ``\\\\`` are aligned at their ``&``."""
    latex = _WORD.sub(_words, latex)
    if "\\\\" in latex:
        latex = rf"\begin{{align*}}{latex}\end{{align*}}"
    return convert(" ".join(latex.split()), display="block")


def fence(source: str, *args: Any, **kwargs: Any) -> str:
    """A fenced block ``math``, as pymdownx.superfences calls its formatters."""
    return block(source)
