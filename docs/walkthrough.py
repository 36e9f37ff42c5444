# SPDX-License-Identifier: Apache-2.0
"""Keep the walkthrough of CONTRIBUTING.md equal to the files that it shows.

A fenced block whose opening line says ``file=PATH`` shows that file whole, less its licence line;
with ``lines`` behind it, lines that stand in the file. Run as a script, this rewrites the whole
files and exits 1 if that changed anything, as pre-commit expects.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = "CONTRIBUTING.md"

_BLOCK = re.compile(r"^```(\w+) file=(\S+)( lines)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LICENCE = re.compile(r"\A(?://|#) SPDX-License-Identifier: .*\n")


class Block(NamedTuple):
    """A part of the walkthrough: a whole file, or lines of one."""

    path: str
    code: str
    whole: bool


def blocks(page: str) -> list[Block]:
    """The blocks of ``page`` that show files, in order."""
    return [Block(path, code, not lines) for _, path, lines, code in _BLOCK.findall(page)]


def shown(root: Path, path: str) -> str:
    """What the walkthrough shows of a whole file."""
    return _LICENCE.sub("", (root / path).read_text(encoding="utf-8"))


def synced(page: str, root: Path) -> str:
    """``page`` with the whole files as they are under ``root``."""

    def replace(match: re.Match[str]) -> str:
        language, path, lines, code = match.groups()
        body = code if lines else shown(root, path)
        return f"```{language} file={path}{lines or ''}\n{body}```"

    return _BLOCK.sub(replace, page)


def main() -> int:
    path = ROOT / PAGE
    before = path.read_text(encoding="utf-8")
    after = synced(before, ROOT)
    path.write_text(after, encoding="utf-8")
    return int(after != before)


if __name__ == "__main__":
    raise SystemExit(main())
