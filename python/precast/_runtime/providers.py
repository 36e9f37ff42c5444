# SPDX-License-Identifier: Apache-2.0
"""Find prebuilt modules: a build tree, installed cache wheels, unpacked bundles."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from precast._base import env as _env
from precast._runtime.manifest import MANIFEST_NAME, Manifest, read_manifest

if TYPE_CHECKING:
    import importlib.metadata

ENTRY_POINT_GROUP = "precast.jit_cache"


class Provider(NamedTuple):
    """A folder with prebuilt modules; ``manifest`` is None if it cannot be read."""

    source: str
    root: Path
    manifest: Manifest | None
    problem: str | None

    @property
    def title(self) -> str:
        """Distribution and version, or the folder if they are not known."""
        if self.manifest is None:
            return str(self.root)
        return f"{self.manifest.distribution} {self.manifest.version}"

    @property
    def label(self) -> str:
        """Its source and its title."""
        return f"{self.source} {self.title}"

    def fix_hint(self, requirement: str) -> str:
        """How to replace modules that do not fit."""
        if self.source != "provider":
            return f"build or unpack {self.root} again"
        from precast._plan.install_hint import reinstall_command

        return reinstall_command(requirement.partition("==")[0], requirement)


def find_providers() -> list[Provider]:
    """All providers, in the order in which the loader asks them."""
    return [_read(source, root) for source, root in _places()]


def _places() -> Iterator[tuple[str, Path]]:
    if _env.KERNEL_DIR():
        yield "PRECAST_KERNEL_DIR", _absolute(_env.KERNEL_DIR())
    seen = set()
    for root in _installed():
        if root not in seen:
            seen.add(root)
            yield "provider", root
    for text in filter(None, _env.PROVIDER_PATH().split(os.pathsep)):
        folder = _absolute(text)
        try:
            inside = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
        except OSError:  # It is reported as an unreadable provider.
            inside = []
        direct = _holds_manifest(folder) or not inside
        for root in [folder] if direct else inside:
            if root not in seen:
                seen.add(root)
                yield "PRECAST_PROVIDER_PATH", root


def _absolute(text: str) -> Path:
    path = Path(text)
    with contextlib.suppress(RuntimeError):  # The user does not exist.
        path = path.expanduser()
    with contextlib.suppress(OSError):  # The working directory was deleted.
        path = path.absolute()
    return path


def _installed() -> Iterator[Path]:
    """Folders of the installed cache wheels, whose packages are located without an import."""
    for point in _entry_points():
        package = point.value.partition(":")[0]
        roots = [_absolute(entry or os.curdir) / package for entry in sys.path]
        found = [root for root in roots if _holds_manifest(root)]
        if found:
            yield found[0]
        elif point.dist is not None:  # It has no manifest: reported as damaged.
            yield Path(str(point.dist.locate_file(package)))


def _entry_points() -> Iterator[importlib.metadata.EntryPoint]:
    import importlib.metadata

    with contextlib.suppress(Exception):
        return iter(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    # The file of some distribution is damaged; what that raises is not documented.
    found: list[importlib.metadata.EntryPoint] = []
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):
            found += distribution.entry_points.select(group=ENTRY_POINT_GROUP)
    return iter(found)


def _holds_manifest(root: Path) -> bool:
    try:
        return (root / MANIFEST_NAME).is_file()
    except OSError:  # This user may not enter the folder.
        return False


def _read(source: str, root: Path) -> Provider:
    try:
        return Provider(source, root, read_manifest(root), None)
    except ValueError as error:
        fix_hint = "reinstall it" if source == "provider" else f"correct {source}"
        return Provider(source, root, None, f"{error}. Fix: {fix_hint}")


@functools.cache
def provider_problem(manifest: Manifest) -> str | None:
    """Why the modules of a provider cannot run here (machine, driver, tvm-ffi), or None."""
    import platform

    from precast._base import tvm_ffi as _tvm_ffi
    from precast._base.driver import driver_cuda_version

    if manifest.machine != platform.machine():
        return f"built for {manifest.machine}, this machine is {platform.machine()}"
    driver = driver_cuda_version()
    if driver is not None and driver[0] < manifest.cuda_major:
        return (
            f"needs driver >= {manifest.min_driver} (CUDA {manifest.cuda_major}); this driver runs "
            f"CUDA {driver[0]}.{driver[1]}. Fix: update the driver, or install the "
            f"cu{driver[0]} modules"
        )
    return _tvm_ffi.range_problem(manifest.tvm_ffi_min, manifest.tvm_ffi_max_exclusive)
