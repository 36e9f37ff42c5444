# SPDX-License-Identifier: Apache-2.0
"""``manifest.json``: the modules of a provider, as read from its installed files.

A provider is a folder with ``manifest.json`` and ``<arch>/<module>.so``: an installed cache wheel,
a build tree, or an unpacked bundle.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from precast._base.files import read_regular

MANIFEST_SCHEMA = 1
MANIFEST_NAME = "manifest.json"
#: A target or module in a path. It contains no separator and is not ``..``.
_PART = re.compile(r"\w[\w.-]*")


class ModuleRow(NamedTuple):
    """One prebuilt module."""

    name: str
    arch: str
    file: str
    fingerprint: str
    size: int
    sha256: str
    exports: tuple[str, ...]
    sass: tuple[str, ...]
    needed: tuple[str, ...]


class Manifest(NamedTuple):
    """One provider."""

    distribution: str
    version: str
    cuda_major: int
    toolkit: str
    min_driver: str
    machine: str
    tvm_ffi_built: str
    tvm_ffi_min: str
    tvm_ffi_max_exclusive: str
    modules: tuple[ModuleRow, ...]

    @property
    def archs(self) -> list[str]:
        return list(dict.fromkeys(row.arch for row in self.modules))

    def dump(self) -> str:
        data = self._asdict()
        data["modules"] = [row._asdict() for row in self.modules]
        return json.dumps({"schema": MANIFEST_SCHEMA, **data}, indent=1) + "\n"


def read_manifest(root: Path) -> Manifest:
    """Read ``root/manifest.json``.

    Raises
    ------
    ValueError
        If it is missing, damaged or of another schema; the message says which.
    """
    path = root / MANIFEST_NAME
    try:
        data = json.loads(read_regular(path)[0])
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ValueError(f"{path} is damaged (nested too deeply)") from None
    except ValueError:
        raise ValueError(f"{path} is damaged (not JSON)") from None
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if type(schema) is not int or schema != MANIFEST_SCHEMA:
        raise ValueError(f"{path} has schema {schema}, this precast reads {MANIFEST_SCHEMA}")
    try:
        if not isinstance(data["modules"], list):
            raise TypeError("'modules'")
        rows = tuple(map(_module_row, data["modules"]))
        fields = _fields(Manifest, data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error} is missing or wrong)") from None
    return Manifest(**fields, modules=rows)


def _module_row(data: object) -> ModuleRow:
    """One row; TypeError if it is none, or its file is not at the path of the module."""
    if not isinstance(data, Mapping):
        raise TypeError("'modules'")
    row = ModuleRow(**_fields(ModuleRow, data))
    for name, part in (("name", row.name), ("arch", row.arch)):
        if not _PART.fullmatch(part):
            raise TypeError(repr(name))
    if row.file != f"{row.arch}/{row.name}.so":
        raise TypeError("'file'")
    return row


@functools.cache
def _hints(row: type) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(row).items() if name != "modules"}


def _fields(row: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``row`` out of ``data``; KeyError or TypeError names one that is wrong."""
    fields: dict[str, Any] = {}
    for name, hint in _hints(row).items():
        value = data[name]
        if hint in (str, int):
            valid = type(value) is hint
        else:
            valid = isinstance(value, list) and all(isinstance(v, str) for v in value)
        if not valid:
            raise TypeError(repr(name))
        fields[name] = tuple(value) if isinstance(value, list) else value
    return fields
