# SPDX-License-Identifier: Apache-2.0
"""The pictures of the performance page, which are drawn while the documentation is built."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import performance

from precast.testing.results import newest
from sitegen import ROOT

#: Where a page finds them.
FOLDER = "img"
#: Stands for a picture that is not drawn.
BLANK = '<svg xmlns="http://www.w3.org/2000/svg"/>'


@functools.cache
def wanted() -> dict[str, list[performance.Picture]]:
    """The pictures of each run, by ``<gpu>/<run>``."""
    return performance.pictures(newest(ROOT / performance.RESULTS))


def drawn() -> dict[str, Path | None]:
    """The file of each picture by its name. A build draws only those whose numbers changed.

    Where nobody looks at the site, as in a test, DOCS_PICTURES=1/8 draws a random eighth of them,
    and the others are None: all together take more time than the pages.
    """
    every = [picture for pictures in wanted().values() for picture in pictures]
    folder = ROOT / performance.PICTURES
    one_of = int(os.environ.get("DOCS_PICTURES", "1/1").removeprefix("1/"))
    performance.draw_pictures(folder, every, one_of)
    paths = {picture.name: folder / picture.name for picture in every}
    return {name: path if path.is_file() else None for name, path in paths.items()}


def of_run(name: str) -> str:
    """The pictures of a run as Markdown; KeyError where there is no such run."""
    return "\n\n".join(f"![{p.text}]({FOLDER}/{p.name})" for p in wanted()[name])
