# SPDX-License-Identifier: Apache-2.0
"""The pictures of the performance page, which are drawn while the documentation is built."""

from __future__ import annotations

import functools
from pathlib import Path

import performance

from precast.testing.results import newest
from sitegen import ROOT

#: Where a page finds them.
FOLDER = "img"


@functools.cache
def wanted() -> dict[str, list[performance.Picture]]:
    """The pictures of each run, by ``<gpu>/<run>``."""
    return performance.pictures(newest(ROOT / performance.RESULTS))


def drawn() -> list[Path]:
    """The files of all pictures. A build draws only those whose numbers changed."""
    every = [picture for pictures in wanted().values() for picture in pictures]
    folder = ROOT / performance.PICTURES
    performance.draw_pictures(folder, every)
    return [folder / picture.name for picture in every]


def of_run(name: str) -> str:
    """The pictures of a run as Markdown; KeyError where there is no such run."""
    return "\n\n".join(f"![{p.text}]({FOLDER}/{p.name})" for p in wanted()[name])
