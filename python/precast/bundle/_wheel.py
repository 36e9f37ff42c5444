# SPDX-License-Identifier: Apache-2.0
"""The metadata of a wheel file."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from precast._base.errors import BundleError
from precast._runtime.manifest import Manifest
from precast.bundle._contents import (
    check_members,
    check_record,
    damage_of,
    info_file,
    opened,
    provider_manifest,
)

#: What is read of METADATA.
_READ_FIELDS = {"name", "version", "requires-dist", "requires-python", "provides-extra"}


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
        except InvalidWheelFilename as error:
            raise BundleError(f"{path} is not a wheel: {error}") from None
        with opened(path) as archive:
            check_members(archive)
            metadata, unread = parse_email(archive.read(info_file(archive, "METADATA")))
            for field in sorted(_READ_FIELDS & set(unread)):  # Such as one that is there twice.
                raise ValueError(f"its METADATA has a wrong field {field!r}")
            says = metadata.get("name", ""), metadata.get("version", "")
            if (canonicalize_name(says[0]), Version(says[1])) != (name, version):
                raise ValueError(f"its METADATA is of {' '.join(says)}")
            manifest = provider_manifest(archive)
            for file in ("WHEEL", "RECORD"):
                info_file(archive, file)
            if manifest is not None or name == "precast":
                check_record(archive)
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
                with damage_of(self.path):
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
