#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Read ``ci/images.toml``: container images by digest, and the source of each CUDA toolkit.

::

    python ci/images.py manylinux.x86_64   # the image to build in: NAME@sha256:...
    python ci/images.py runtime            # the base of docker/runtime.Dockerfile
    python ci/images.py --packages 12      # the packages of a toolkit, one a line
    python ci/images.py --check            # compare with cibuildwheel and the Dockerfiles
"""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "ci" / "images.toml"
#: Dockerfiles that repeat an image as the default of an ARG, so that `docker build` alone works.
DOCKERFILES = {"build": "manylinux.x86_64", "runtime": "runtime"}

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def read(path: Path = TABLE) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def reference(name: str, table: dict[str, Any] | None = None) -> str:
    """The image called ``name`` (``manylinux.x86_64``, ``runtime``) with its digest.

    Raises
    ------
    ValueError
        If there is no such image, or it is not pinned by a digest.
    """
    row: Any = read() if table is None else table
    for part in name.split("."):
        row = row.get(part, {})
    if "image" not in row:
        raise ValueError(f"ci/images.toml has no image {name!r}")
    if _DIGEST.fullmatch(row.get("digest", "")) is None:
        raise ValueError(
            f"ci/images.toml: {name}: digest is {row.get('digest')!r}; legal: sha256: and 64 "
            f"hexadecimal digits. Fix: docker pull {row['image']}:{row.get('tag')}, then docker "
            f"images --digests"
        )
    return f"{row['image']}@{row['digest']}"


def machines() -> dict[str, dict[str, str]]:
    """The machines that wheels are built for, with the runner of each."""
    rows: dict[str, dict[str, str]] = read()["manylinux"]
    return rows


def toolkit(cuda: int) -> dict[str, Any]:
    """The source of one CUDA major's compiler in the image."""
    rows = read()["cuda"]
    if str(cuda) not in rows:
        raise ValueError(f"ci/images.toml has no CUDA {cuda}; legal: {', '.join(rows)}")
    row: dict[str, Any] = rows[str(cuda)]
    return row


def problems(root: Path = ROOT) -> list[str]:
    """List problems: a tag instead of a digest, or a copy that differs."""
    table = read(root / "ci" / "images.toml")
    found = []
    images = {f"manylinux.{machine}" for machine in table["manylinux"]} | {"runtime"}
    for name in sorted(images):
        try:
            reference(name, table)
        except ValueError as error:
            found.append(str(error))
    for file, name in DOCKERFILES.items():
        text = (root / "docker" / f"{file}.Dockerfile").read_text(encoding="utf-8")
        stated = re.findall(r"^ARG BASE_IMAGE=(\S+)$", text, re.MULTILINE)
        if not found and stated != [reference(name, table)]:
            found.append(
                f"docker/{file}.Dockerfile: ARG BASE_IMAGE is {', '.join(stated) or 'missing'}; "
                f"ci/images.toml has {reference(name, table)}"
            )
    pinned = _pinned_by_cibuildwheel()
    for machine in table["manylinux"] if pinned and not found else ():
        ours, theirs = reference(f"manylinux.{machine}", table), pinned[machine]
        if ours != theirs:
            found.append(f"manylinux.{machine} is {ours}; the cibuildwheel here has {theirs}")
    return found


def _pinned_by_cibuildwheel() -> dict[str, str]:
    """The manylinux_2_28 images of the cibuildwheel in this environment; empty without one."""
    spec = importlib.util.find_spec("cibuildwheel")
    if spec is None or not spec.submodule_search_locations:
        return {}
    path = Path(spec.submodule_search_locations[0]) / "resources" / "pinned_docker_images.cfg"
    config = configparser.ConfigParser(inline_comment_prefixes=("#",))
    config.read(path, encoding="utf-8")
    key = "manylinux_2_28"
    return {machine: row[key] for machine, row in config.items() if key in row}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Read ci/images.toml.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", help="an image, such as manylinux.x86_64 or runtime")
    what.add_argument("--packages", type=int, metavar="CUDA", help="the packages of a toolkit")
    what.add_argument("--check", action="store_true", help="digests and copies agree")
    args = parser.parse_args(argv)
    try:
        if args.check:
            found = problems()
            print("\n".join(found) or "every image is pinned by its digest")
            return int(bool(found))
        if args.packages is not None:
            print("\n".join(toolkit(args.packages).get("packages", ())))
        else:
            print(reference(args.name))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
