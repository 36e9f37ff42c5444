# SPDX-License-Identifier: Apache-2.0
"""The Markdown helpers that the generated parts share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; cells may contain line breaks and bars."""
    lines = [_row(header), _row("---" for _ in header), *map(_row, rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(c.split()).replace("|", r"\|") for c in cells) + " |"


def text(plain: str) -> str:
    """Mark names of variables, options and files in plain text as code.

    Existing code, inline or in a block, does not change.
    """
    parts = re.split(r"(```.*?```|`+[^`]+`+|^ {4}[^\n]*$)", plain, flags=re.S | re.M)
    return "".join(p if p.startswith(("`", "    ")) else _CODE.sub(r"`\g<0>`", p) for p in parts)


_CODE = re.compile(
    r"""
    \b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?:=\w+)?  # PRECAST_JIT=error
    | (?<![\w-])--[a-z][a-z-]+                # --arch
    | '[^'\s](?:[^']*[^'\s])?'(?!\w)          # '8.0 9.0a'
    | \b\w+\.(?:json|toml|sh|py)\b            # manifest.json
    """,
    re.VERBOSE,
)


def summary(docstring: str) -> str:
    """The first line of a docstring."""
    return docstring.strip().partition("\n")[0]


def with_block(text: str, name: str, block: str) -> str:
    """``text`` with the block replaced that ``<!-- name:begin ... -->`` starts.

    ``<!-- name:end -->`` ends it.

    Raises
    ------
    ValueError
        If the text does not have exactly one such block.
    """
    marks = re.compile(rf"(<!-- {name}:begin .*?-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    if len(marks.findall(text)) != 1:
        raise ValueError(f"the text needs one block between {name}:begin and {name}:end")
    return marks.sub(lambda match: f"{match[1]}\n{block}\n{match[2]}", text)


def fence(language: str, body: str) -> str:
    return f"```{language}\n{body.rstrip()}\n```\n"
