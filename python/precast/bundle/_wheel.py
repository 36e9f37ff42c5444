# SPDX-License-Identifier: Apache-2.0
"""The metadata of a wheel file."""

from __future__ import annotations

import configparser
import functools
import json
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from precast._base.errors import BundleError
from precast._runtime.manifest import MANIFEST_NAME, Manifest, read_manifest
from precast._runtime.providers import ENTRY_POINT_GROUP

_PLAN = "precast/data/plan.json"


@functools.total_ordering
@dataclass(frozen=True, eq=False)
class Wheel:
    """One wheel file; ``manifest`` is set if it has prebuilt modules."""

    path: Path
    name: str
    version: Version
    tags: frozenset[Tag]
    requires: tuple[Requirement, ...]
    requires_python: SpecifierSet
    extras: frozenset[str]
    manifest: Manifest | None

    def __lt__(self, other: Wheel) -> bool:
        return (self.name, self.version) < (other.name, other.version)

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """Read name, tags, requirements and manifest.

        Raises
        ------
        BundleError
            If it is not a readable wheel.
        """
        try:
            name, version, _, tags = parse_wheel_filename(path.name)
            with zipfile.ZipFile(path) as archive:
                metadata, _ = parse_email(archive.read(_info(archive, "METADATA")))
                manifest = _manifest(archive)
        except OSError as error:
            raise BundleError(f"{path} cannot be read ({error.strerror})") from None
        except InvalidWheelFilename as error:
            raise BundleError(f"{path} is not a wheel: {error}") from None
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise BundleError(f"{path} is damaged: {error}") from None
        return cls(
            path=path,
            name=name,
            version=version,
            tags=tags,
            requires=tuple(map(Requirement, metadata.get("requires_dist", ()))),
            requires_python=SpecifierSet(metadata.get("requires_python", "")),
            extras=frozenset(map(canonicalize_name, metadata.get("provides_extra", ()))),
            manifest=manifest,
        )

    def at(self, path: Path) -> Wheel:
        """The same wheel at another path."""
        return replace(self, path=path)

    def requires_for(self, extra: str, environment: dict[str, str]) -> Iterator[Requirement]:
        """Its requirements under these markers because of ``extra`` ("" for the basic ones)."""
        values = {**environment, "extra": extra}
        for requirement in self.requires:
            if requirement.marker is None:
                applies = extra == ""
            else:
                applies = requirement.marker.evaluate(values)
            if applies:
                yield requirement

    def unsuitable(self, tags: frozenset[Tag], python: str) -> str | None:
        """Why it cannot be installed on the target, or None."""
        if not self.tags & tags:
            return f"is for {', '.join(sorted(map(str, self.tags)))}"
        if not self.requires_python.contains(f"{python}.0", prereleases=True):
            return f"needs Python {self.requires_python}"
        return None

    @property
    def interpreter_bound(self) -> bool:
        """Whether it installs into only one version of Python."""
        return all(
            tag.interpreter.startswith("cp") and tag.abi not in ("abi3", "none")
            for tag in self.tags
        )

    def plan(self) -> dict[str, Any]:
        """The plan in a core wheel."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                plan: dict[str, Any] = json.loads(archive.read(_PLAN))
        except KeyError:
            raise BundleError(
                f"{self.path.name} has no {_PLAN}: it is not a complete wheel of precast"
            ) from None
        return plan


def _info(archive: zipfile.ZipFile, file: str) -> str:
    for name in archive.namelist():
        folder, _, rest = name.partition("/")
        if folder.endswith(".dist-info") and rest == file:
            return name
    raise KeyError(f"it has no {file}")


def _manifest(archive: zipfile.ZipFile) -> Manifest | None:
    """The manifest of the package that the entry point of a provider names."""
    try:
        text = archive.read(_info(archive, "entry_points.txt")).decode()
    except KeyError:
        return None
    points = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    points.read_string(text)
    if not points.has_section(ENTRY_POINT_GROUP):
        return None
    package = next(iter(points[ENTRY_POINT_GROUP].values())).partition(":")[0].strip()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST_NAME).write_bytes(archive.read(f"{package}/{MANIFEST_NAME}"))
        return read_manifest(Path(folder))
