# SPDX-License-Identifier: Apache-2.0
"""Write docs/index.md's table of ops from what ``precast`` exports: a new op needs no edit."""

from __future__ import annotations

import enum

from sitegen import ROOT, markup, ops

import precast

PAGE = "docs/index.md"


def table() -> str:
    """A row for each op: its functions, and the element types that its TOML declares."""
    rows = [
        (f"`{op}`", ", ".join(f"`{p.name}`" for p in functions if _runs(p.name)), ops.dtypes(op))
        for op, functions in ops.families().items()
    ]
    return markup.table(("op", "functions", "dtypes"), rows)


def _runs(name: str) -> bool:
    """Whether it is a function or a wrapper, not a type of their arguments or results."""
    value = getattr(precast, name)
    return not (isinstance(value, type) and issubclass(value, (enum.Enum, tuple)))


def made(page: str) -> str:
    """The page's text with the table as it should be."""
    return markup.with_block(page, "ops", table())


if __name__ == "__main__":
    path = ROOT / PAGE
    before = path.read_text(encoding="utf-8")
    after = made(before)
    if after != before:
        path.write_text(after, encoding="utf-8")
        print(PAGE)
