# SPDX-License-Identifier: Apache-2.0
"""What mkdocs calls while it builds the documentation; the work is done in ``sitegen``.

A line ``<!-- generated: NAME ARGUMENT -->`` of a page is replaced by what ``sitegen`` makes of it.
"""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import CombinedEvent, event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils.templates import TemplateContext
from sitegen import inserts, links, mathml, ops, pictures, public

_LISTING = re.compile(r'<details class="mkdocstrings-source">.*?</details>', re.DOTALL)
_PLACE = "<!-- source listing -->"
_listings: list[str] = []


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Teach the fences of Markdown to render formulas."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences.setdefault("custom_fences", []).append(
        {"name": "math", "class": "math", "format": mathml.fence}
    )
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what exists nowhere but in the code: pages of the reference and pictures of results."""
    for path, text in ops.pages().items():
        files.append(File.generated(config, path, content=text))
    for name, path in pictures.drawn().items():
        given = {"content": pictures.BLANK} if path is None else {"abs_src_path": str(path)}
        files.append(File.generated(config, f"{pictures.FOLDER}/{name}", **given))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    text = public.with_definitions(inserts.filled(markdown))
    return links.rewritten(text, page.file.src_uri)


@event_priority(100)
def _before_search(
    context: TemplateContext, page: Page, config: MkDocsConfig, nav: Navigation
) -> TemplateContext:
    """Take the listings of source code out of a page: the search is to find what explains a name.

    They are also half of what the plugin ``search`` would have to parse.
    """
    text = page.content or ""
    _listings[:] = _LISTING.findall(text)
    page.content = _LISTING.sub(_PLACE, text)
    return context


@event_priority(-100)
def _after_search(
    context: TemplateContext, page: Page, config: MkDocsConfig, nav: Navigation
) -> TemplateContext:
    text, *rest = (page.content or "").split(_PLACE)
    page.content = text + "".join(a + b for a, b in zip(_listings, rest, strict=True))
    return context


on_page_context = CombinedEvent(_before_search, _after_search)
