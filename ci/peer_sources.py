# SPDX-License-Identifier: Apache-2.0
"""Python files of a wheel or an sdist, read without installing it."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def read_archive(path: Path) -> Iterator[tuple[PurePosixPath, str]]:
    """The Python files and what may list requirements, by path without the root of an sdist."""

    def wanted(name: str) -> bool:
        return name.endswith((".py", "/METADATA", "/PKG-INFO", ".txt"))

    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in filter(wanted, wheel.namelist()):
                yield PurePosixPath(name), wheel.read(name).decode(errors="replace")
        return
    with tarfile.open(path) as sdist:
        for member in sdist:
            file = sdist.extractfile(member) if wanted(member.name) else None
            if file is not None:
                inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                yield inside, file.read().decode(errors="replace")


def module_of(path: PurePosixPath) -> str:
    """The dotted name of the module in a file."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
