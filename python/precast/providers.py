# SPDX-License-Identifier: Apache-2.0
"""Find prebuilt modules: a build tree, installed cache wheels, unpacked bundles."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from precast import _env
from precast.manifest import MANIFEST_NAME, Manifest, read_manifest

ENTRY_POINT_GROUP = "precast.jit_cache"


class Provider(NamedTuple):
    """A place that says it holds prebuilt modules; ``manifest`` is None if it does not hold up."""

    source: str
    root: Path
    manifest: Manifest | None
    problem: str | None

    @property
    def label(self) -> str:
        if self.manifest is None:
            return f"{self.source} {self.root}"
        return f"{self.source} {self.manifest.distribution} {self.manifest.version}"


def find_providers() -> list[Provider]:
    """All providers in the order in which the loader asks them."""
    return [_read(source, root) for source, root in _places()]


def _places() -> Iterator[tuple[str, Path]]:
    if _env.KERNEL_DIR():
        yield "PRECAST_KERNEL_DIR", Path(_env.KERNEL_DIR()).expanduser().absolute()
    seen = set()
    for root in _installed():
        if root not in seen:
            seen.add(root)
            yield "provider", root
    for text in filter(None, _env.PROVIDER_PATH().split(os.pathsep)):
        folder = Path(text).expanduser().absolute()
        inside = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
        direct = (folder / MANIFEST_NAME).is_file() or not inside
        for root in [folder] if direct else inside:
            if root not in seen:
                seen.add(root)
                yield "PRECAST_PROVIDER_PATH", root


def _installed() -> Iterator[Path]:
    """Folders of the installed cache wheels; their packages are located, never imported."""
    import importlib.metadata

    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        package = point.value.partition(":")[0]
        for entry in sys.path:
            root = Path(entry or os.curdir).absolute() / package
            if (root / MANIFEST_NAME).is_file():
                yield root
                break


def _read(source: str, root: Path) -> Provider:
    try:
        return Provider(source, root, read_manifest(root), None)
    except ValueError as error:
        mend = "reinstall it" if source == "provider" else f"correct {source}"
        return Provider(source, root, None, f"{error}. Fix: {mend}")
