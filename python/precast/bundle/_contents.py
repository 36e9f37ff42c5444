# SPDX-License-Identifier: Apache-2.0
"""Whether a wheel holds what its own records say.

pip compares nothing: a wheel that is damaged would be noticed on the machine without a network.
Source: PyPA specification "Recording installed projects" and "Binary distribution format".
"""

from __future__ import annotations

import configparser
import csv
import hashlib
import json
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from precast._base.errors import BundleError
from precast._base.files import open_regular
from precast._base.shared_object import defect
from precast._base.trust import record_digest
from precast._runtime.manifest import MANIFEST_NAME, Manifest, read_manifest
from precast._runtime.providers import ENTRY_POINT_GROUP

try:
    import lzma
except ImportError:  # Python was built without it; zipfile then refuses such members.
    lzma = None  # type: ignore[assignment]

_PLAN = "precast/data/plan.json"
#: What zipfile, the compressions, configparser, csv, packaging and json raise for a file that is
#: damaged; an unknown compression and an encrypted member are a RuntimeError.
_DAMAGE: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    zlib.error,
    *([] if lzma is None else [lzma.LZMAError]),
    EOFError,
    configparser.Error,
    csv.Error,
    KeyError,
    ValueError,
    RuntimeError,
)


@contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """Turn every error of reading a wheel into one BundleError that names it."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror or error})") from None
    except _DAMAGE as error:
        # A KeyError shows its text in quotes; others have several lines.
        text = str(error.args[0] if isinstance(error, KeyError) else error)
        raise BundleError(
            f"{path} is damaged: {' '.join(text.split())}. Fix: build or fetch it again"
        ) from None


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a wheel; every error of reading it names it."""
    with damage_of(path), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


def info_file(archive: zipfile.ZipFile, file: str) -> str:
    """The name of a file of the folder ``.dist-info``; KeyError if it is missing."""
    for name in archive.namelist():
        folder, _, rest = name.partition("/")
        if folder.endswith(".dist-info") and rest == file:
            return name
    raise KeyError(f"it has no {file}")


def check_members(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if a member would be written outside the folder of the packages."""
    for name in archive.namelist():
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name:
            raise ValueError(f"its member {name!r} lies outside")


def check_record(archive: zipfile.ZipFile) -> None:
    """Raise ValueError unless ``RECORD`` lists each file with its digest."""
    record = info_file(archive, "RECORD")
    rows = {row[0]: row for row in csv.reader(archive.read(record).decode().splitlines()) if row}
    files = {name for name in archive.namelist() if not name.endswith("/")}
    for name in sorted(files ^ set(rows)):
        where = "is not in RECORD" if name in files else "is in RECORD and missing"
        raise ValueError(f"{name} {where}")
    for name in sorted(files - {record}):
        data = archive.read(name)
        if rows[name][1:] != [f"sha256={record_digest(data)}", str(len(data))]:
            raise ValueError(f"{name} is not what RECORD says (sha256 or size differs)")


def provider_manifest(archive: zipfile.ZipFile) -> Manifest | None:
    """The manifest of a wheel of prebuilt modules, compared with them; None of other wheels."""
    try:
        text = archive.read(info_file(archive, "entry_points.txt")).decode()
    except KeyError:
        return None
    points = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    points.read_string(text)
    if not points.has_section(ENTRY_POINT_GROUP):
        return None
    values = list(points[ENTRY_POINT_GROUP].values())
    if len(values) != 1:
        raise ValueError(f"entry_points.txt has {len(values)} packages of {ENTRY_POINT_GROUP}")
    package = values[0].partition(":")[0].strip()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST_NAME).write_bytes(archive.read(f"{package}/{MANIFEST_NAME}"))
        try:
            manifest = read_manifest(Path(folder))
        except ValueError as error:
            raise ValueError(str(error).replace(folder, package)) from None
    _check_modules(archive, package, manifest)
    return manifest


def _check_modules(archive: zipfile.ZipFile, package: str, manifest: Manifest) -> None:
    there = {name for name in archive.namelist() if name.endswith(".so")}
    listed = {f"{package}/{row.file}" for row in manifest.modules}
    for name in sorted(there ^ listed):
        where = "is not in the manifest" if name in there else "is in the manifest and missing"
        raise ValueError(f"{name} {where}")
    for row in manifest.modules:
        data = archive.read(f"{package}/{row.file}")
        if (len(data), hashlib.sha256(data).hexdigest()) != (row.size, row.sha256):
            raise ValueError(f"{row.file} is not what the manifest says (sha256 or size differs)")
        problem = defect(data, row.exports, manifest.machine)
        if problem is not None:
            raise ValueError(f"{row.file} {problem}")


def core_plan(path: Path) -> dict[str, Any]:
    """The plan in a core wheel; BundleError if there is none."""
    with opened(path) as archive:
        if _PLAN not in archive.namelist():
            raise ValueError(f"it has no {_PLAN}: it is not a complete wheel of precast")
        plan: Any = json.loads(archive.read(_PLAN))
        modules = plan.get("modules") if isinstance(plan, dict) else None
        rows = modules.values() if isinstance(modules, dict) else [None]
        tables = [row.get("fingerprints") if isinstance(row, dict) else None for row in rows]
        if not all(isinstance(t, dict) and all(map(_is_of_texts, t.values())) for t in tables):
            raise ValueError(f"{_PLAN} is not a plan")
        return dict(plan)


def _is_of_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
