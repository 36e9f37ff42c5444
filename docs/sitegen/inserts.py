# SPDX-License-Identifier: Apache-2.0
"""Fill in the lines ``<!-- generated: NAME ARGUMENT -->`` of a page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sitegen import ROOT, commands, pictures, raised, settings, versions

_MARK = re.compile(r"^<!-- generated: (\w+)(?: (\S+))? -->$", re.MULTILINE)


def file(path: str) -> str:
    """A Markdown file of the repository, with titles of code blocks as mkdocs expects them."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.sub(
        r"^```(\w+) (?:file|new)=(\S+)( lines)?$", r'```\1 title="\2"', text, flags=re.MULTILINE
    )


def source(path: str) -> str:
    """A file of code, whole but for its licence line."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = {".cu": "cpp", ".py": "python"}[Path(path).suffix]
    text = re.sub(r"\A(?://|#) SPDX-License-Identifier: .*\n", "", text)
    return f'```{language} title="{path}"\n{text}```'


def drawing(name: str) -> str:
    """A drawing inside the page, so that it has the colours of the reader's theme."""
    text = (ROOT / "docs" / "drawings" / name).read_text(encoding="utf-8")
    svg = text[text.index("<svg") :].rstrip()
    return f"<figure>\n{svg}\n</figure>"


#: The generators by name. Each takes the argument of the line, if it has one.
INSERTS: dict[str, Callable[..., str]] = {
    "commands": commands.reference,
    "cuda": versions.cuda,
    "drawing": drawing,
    "environment": settings.environment,
    "exit_codes": commands.exit_codes,
    "file": file,
    "formats": versions.formats,
    "pictures": pictures.of_run,
    "raised": raised.example,
    "requirements": versions.requirements,
    "source": source,
    "toml_keys": settings.toml_keys,
}


def filled(page: str) -> str:
    """``page`` with every generated part filled in; KeyError for an unknown name."""

    def replace(match: re.Match[str]) -> str:
        name, argument = match.groups()
        return INSERTS[name](*([argument] if argument else []))

    return _MARK.sub(replace, page)
