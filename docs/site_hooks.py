# SPDX-License-Identifier: Apache-2.0
"""What mkdocs calls while it builds the documentation; the work is done in ``sitegen``.

A line ``<!-- generated: NAME ARGUMENT -->`` of a page is replaced by what ``sitegen`` makes of it.
"""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from sitegen import inserts, links, mathml, ops, pictures, public


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
    for picture in pictures.drawn():
        to = f"{pictures.FOLDER}/{picture.name}"
        files.append(File.generated(config, to, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    text = public.with_definitions(inserts.filled(markdown))
    return links.rewritten(text, page.file.src_uri)
