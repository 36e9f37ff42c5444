# SPDX-License-Identifier: Apache-2.0
"""Links of pages that are also read outside the site.

A link to a file of the repository becomes a link to the page that shows it, or plain text if no
page does, because the site works without the repository. A link to a missing file stays, and mkdocs
refuses it.
"""

from __future__ import annotations

import posixpath
import re

from sitegen import ROOT

#: Pages that show a file of the repository. Its links are relative to the folder of the file.
INCLUDED = {"docs/changelog.md": "CHANGELOG.md", "docs/contributing.md": "CONTRIBUTING.md"}
#: The page for each linked file of the repository.
SHOWN = {
    **{source: page for page, source in INCLUDED.items()},
    "README.md": "docs/index.md",
    "aot_configs": "docs/configuration.md",
}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def rewritten(markdown: str, page: str) -> str:
    """``markdown`` of the page ``page`` (its path below ``docs/``), with links to pages."""
    shown = f"docs/{page}"
    home = posixpath.dirname(shown)
    base = posixpath.dirname(INCLUDED.get(shown, shown))

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(base, target))
        path = SHOWN.get(path, path)
        if path.startswith("docs/"):
            return f"[{text}]({posixpath.relpath(path, home)}{anchor or ''})"
        if not (ROOT / path).exists():
            return match[0]
        return text if text.startswith("`") else f"{text} (`{path}`)"

    return "".join(
        part if part.startswith("```") else _LINK.sub(replace, part)
        for part in re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    )
