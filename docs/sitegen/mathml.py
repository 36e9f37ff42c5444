# SPDX-License-Identifier: Apache-2.0
"""Formulas as MathML, which browsers render by themselves: no script, no font, no network."""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def block(latex: str) -> str:
    """A displayed formula; lines that end with ``\\\\`` are aligned at their ``&``."""
    if "\\\\" in latex:
        latex = rf"\begin{{align}}{latex}\end{{align}}"
    return convert(" ".join(latex.split()), display="block")


def fence(source: str, *args: Any, **kwargs: Any) -> str:
    """A fenced block ``math``, as pymdownx.superfences calls its formatters."""
    return block(source)
