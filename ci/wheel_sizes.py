#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keep the sizes of built wheels for docs/support.md.

::

    python ci/wheel_sizes.py --profile core wheelhouse/precast_jit_cache_*.whl

Writes docs/wheel_sizes.json; a wheel replaces the row of its target, CUDA major, machine and
profile, and other rows stay. ci/build_wheels.sh builds the wheels, and checks them.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SIZES = ROOT / "docs" / "wheel_sizes.json"

sys.path.insert(0, str(ROOT / "python"))
from precast._runtime.manifest import MANIFEST_NAME  # noqa: E402


class Size(NamedTuple):
    """One wheel of modules: its size in bytes, and that of its modules once installed."""

    target: str
    cuda: int
    machine: str
    profile: str
    modules: int
    wheel: int
    installed: int


def measure(wheel: Path, profile: str) -> Size:
    """Read the manifest of a wheel of modules, which has one target."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(f"/{MANIFEST_NAME}"))
        manifest = json.loads(archive.read(name))
    modules = manifest["modules"]
    (target,) = {row["arch"] for row in modules}
    kind = target, manifest["cuda_major"], manifest["machine"], profile
    return Size(*kind, len(modules), wheel.stat().st_size, sum(row["size"] for row in modules))


def merged(old: Iterable[Size], new: Iterable[Size]) -> list[Size]:
    """Replace the rows of the same target, CUDA major, machine and profile."""
    rows = {row[:4]: row for row in (*old, *new)}
    return [rows[key] for key in sorted(rows)]


def read(path: Path = SIZES) -> list[Size]:
    """Read the kept rows; none if there is no file."""
    if not path.exists():
        return []
    return [Size(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--profile", default="core", help="that the wheels hold (default: core)")
    parser.add_argument("-o", "--output", type=Path, default=SIZES, metavar="FILE")
    args = parser.parse_args(argv)
    rows = merged(read(args.output), (measure(wheel, args.profile) for wheel in args.wheels))
    text = ",\n".join(f"  {json.dumps(row._asdict())}" for row in rows)
    args.output.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
