# SPDX-License-Identifier: Apache-2.0
"""Check the links of a built site on a disk: what its pages point at, and what they load."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes that make a browser fetch something without a click.
_LOADS = {
    ("audio", "src"),
    ("iframe", "src"),
    ("image", "href"),
    ("img", "src"),
    ("script", "src"),
    ("source", "src"),
    ("source", "srcset"),
    ("use", "href"),
    ("video", "src"),
}
_LOADING_RELATIONS = {"icon", "modulepreload", "preconnect", "preload", "prefetch", "stylesheet"}


class Page(HTMLParser):
    """The anchors, links and loaded files of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(filter(None, (given.get("id"), given.get("name"))))
        for name, value in given.items():
            if (tag, name) in _LOADS:
                self.loads.append(value)
        if tag == "link" and _LOADING_RELATIONS & set(given.get("rel", "").split()):
            self.loads.append(given["href"])
        elif "href" in given and tag in ("a", "link"):
            self.links.append(given["href"])


@functools.cache
def read(site: Path) -> dict[Path, Page]:
    """The pages of a site that is complete; reading all of them takes seconds."""
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def problems(site: Path) -> Iterator[str]:
    """What is wrong: a missing file or anchor, a bad address, a file loaded from elsewhere."""
    pages = read(site)
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for link in page.links + page.loads:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                if address.scheme not in ("https", "http") or "." not in address.netloc:
                    yield f"{name}: {link!r} is malformed"
                elif link in page.loads:
                    yield f"{name}: {link!r} is loaded from elsewhere"
                continue
            # The page for wrong addresses is served below any folder: its links start at the top.
            base = site if address.path.startswith("/") else path.parent
            target = (base / unquote(address.path).lstrip("/")).resolve() if address.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{name}: {link!r} does not exist"
            elif target in pages and address.fragment:
                anchor = unquote(address.fragment)
                if anchor not in pages[target].anchors:
                    yield f"{name}: {link!r} has no such anchor"
