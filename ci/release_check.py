#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check a whole set of wheels before any of it is published.

::

    python ci/release_check.py --profile core wheelhouse            # the wheels that exist
    python ci/release_check.py --complete --write-sums wheelhouse   # a release, with all wheels

``ci/check_wheel.py`` checks each wheel (size, manifest = plan, hashes, exports, libraries, machine
code) with the limits of manylinux_2_28. This script checks the set: one core, each wheel of
``ci/matrix.py`` exactly once, one version, a correct RECORD, and every digest of ``SHA256SUMS``.
"""

from __future__ import annotations

import argparse
import base64
import collections
import csv
import hashlib
import io
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "python")]
import matrix  # noqa: E402
from check_wheel import check_wheel  # noqa: E402

from precast._base.version import __version__  # noqa: E402
from precast._plan.planner import Plan  # noqa: E402
from precast._runtime.manifest import MANIFEST_NAME  # noqa: E402

SUMS = "SHA256SUMS"
#: The newest symbols that every manylinux_2_28 system has (PEP 600, auditwheel's policy).
MAX_GLIBC, MAX_GLIBCXX = "2.28", "3.4.24"


class Name(NamedTuple):
    """The parts of a wheel's file name."""

    distribution: str
    version: str
    platform: str

    @classmethod
    def of(cls, wheel: Path) -> Name:
        name, version, *_, platform = wheel.stem.split("-")
        return cls(name.replace("_", "-"), version, platform)


def check_set(
    folder: Path,
    plan: Plan,
    profile: str,
    complete: bool = False,
    max_glibc: str = MAX_GLIBC,
    max_glibcxx: str = MAX_GLIBCXX,
) -> dict[str, list[str]]:
    """List problems by wheel; those of no single wheel are under ``"the set"``.

    Parameters
    ----------
    complete : bool
        Whether a missing wheel of ``ci/matrix.py`` is a problem.
    """
    wheels = sorted(folder.glob("*.whl"))
    found = {
        wheel.name: [
            *check_wheel(wheel, plan, profile, max_glibc, max_glibcxx),
            *_record_problems(wheel),
        ]
        for wheel in wheels
    }
    found["the set"] = [*_set_problems(wheels, plan, complete), *_sums_problems(folder, wheels)]
    return found


def _set_problems(wheels: Sequence[Path], plan: Plan, complete: bool) -> Iterator[str]:
    names = [Name.of(wheel) for wheel in wheels]
    if not wheels:
        yield "there is no wheel"
    for wheel, name in zip(wheels, names):
        if name.version != __version__:
            yield f"{wheel.name}: version {name.version}; this checkout is {__version__}"
    planned = collections.Counter(
        (row["distribution"], row["machine"]) for row in matrix.rows(plan)
    )
    planned["precast", "any"] = 1
    machines = {machine for _, machine in planned}
    there = collections.Counter((name.distribution, _machine(name, machines)) for name in names)
    for key, count in sorted(there.items()):
        if key not in planned:
            yield f"{key[0]} for {key[1]}: ci/matrix.py does not list it"
        elif count > 1:
            yield f"{key[0]} for {key[1]}: {count} wheels, one is planned"
    for key in sorted(planned.keys() - there) if complete else ():
        yield f"{key[0]} for {key[1]}: missing"


def _machine(name: Name, machines: set[str]) -> str:
    fits = (machine for machine in machines if name.platform.endswith(machine))
    return next(fits, name.platform)


def _record_problems(wheel: Path) -> Iterator[str]:
    """Compare RECORD, which pip uses to uninstall, with the files of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if not name.endswith("/")]
        records = [name for name in members if name.endswith(".dist-info/RECORD")]
        if len(records) != 1:
            yield f"{len(records)} RECORD files, one is needed"
            return
        rows = list(csv.reader(io.StringIO(archive.read(records[0]).decode())))
        stated = {row[0]: row[1] for row in rows if row}
        if len(members) != len(set(members)):
            yield "a file is in it twice"
        for name in sorted(set(members) - stated.keys()):
            yield f"{name}: not in RECORD"
        for name in sorted(stated.keys() - set(members)):
            yield f"{name}: in RECORD, but missing"
        for name in sorted(stated.keys() & set(members)):
            digest = hashlib.sha256(archive.read(name)).digest()
            wanted = "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            if name != records[0] and stated[name] != wanted:
                yield f"{name}: its digest is not that of RECORD"
        manifests = [name for name in members if name.endswith(f"/{MANIFEST_NAME}")]
        if Name.of(wheel).distribution != "precast" and len(manifests) != 1:
            yield f"{len(manifests)} files {MANIFEST_NAME}, one is needed"


def sums(wheels: Sequence[Path]) -> str:
    """``SHA256SUMS`` of wheels, as ``sha256sum -c`` reads it."""
    return "".join(f"{_sha256(wheel)}  {wheel.name}\n" for wheel in sorted(wheels))


def read_sums(path: Path) -> dict[str, str]:
    """File names and their digests."""
    rows = (line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines())
    return {name.lstrip("*"): digest for digest, name in rows}


def _sums_problems(folder: Path, wheels: Sequence[Path]) -> Iterator[str]:
    path = folder / SUMS
    if not path.is_file():
        return
    stated = read_sums(path)
    there = {wheel.name: wheel for wheel in wheels}
    for name in sorted(stated.keys() | there.keys()):
        if name not in stated:
            yield f"{name}: not in {SUMS}"
        elif name not in there:
            yield f"{name}: in {SUMS}, but missing"
        elif _sha256(there[name]) != stated[name]:
            yield f"{name}: its digest is not that of {SUMS}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check a set of wheels.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", default="core", help="profile of the modules")
    parser.add_argument("--complete", action="store_true", help="every planned wheel must be there")
    parser.add_argument("--tag", help="the tag that is released, such as v0.1.0")
    parser.add_argument("--write-sums", action="store_true", help=f"write {SUMS} if all is correct")
    parser.add_argument("--max-glibc", default=MAX_GLIBC)
    parser.add_argument("--max-glibcxx", default=MAX_GLIBCXX)
    args = parser.parse_args(argv)
    found = check_set(
        args.folder, Plan.load(ROOT), args.profile, args.complete, args.max_glibc, args.max_glibcxx
    )
    if args.tag not in (None, f"v{__version__}"):
        found["the set"].append(f"the tag is {args.tag}, the version {__version__}")
    for name, problems in found.items():
        print(f"{name}: {'FAILED' if problems else 'ok'}")
        for problem in problems:
            print(f"  {problem}")
    if any(found.values()):
        return 1
    if args.write_sums:
        (args.folder / SUMS).write_text(sums(list(args.folder.glob("*.whl"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
