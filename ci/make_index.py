#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the package index (PEP 503) of released wheels, and publish it in one step.

::

    python ci/make_index.py -o public/simple \
      --release https://host/releases/v0.1.0 sums/v0.1.0/SHA256SUMS \
      --release https://host/releases/v0.2.0 sums/v0.2.0/SHA256SUMS
    pip install --index-url https://host/simple/ precast-jit-cache-cu13-sm90a

Wheels stay at their release; the index holds their addresses and digests, which pip checks. The
pages are written to a new folder beside ``public/simple``, which is a link. At the end the link is
moved to the new folder, so a reader sees the old index or the new one, never a part.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import html
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "ci"))
from release_check import Name, read_sums  # noqa: E402

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="pypi:repository-version" content="1.0">
<title>{title}</title>
</head>
<body>
<h1>{title}</h1>
{links}
</body>
</html>
"""


def pages(releases: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    """The pages by path, ``{"": root, "precast": its wheels}``.

    Parameters
    ----------
    releases : sequence
        The address below which the wheels of a release lie, and their digests by file name.

    Raises
    ------
    ValueError
        If a digest is malformed, or one file name stands for two different contents.
    """
    projects: dict[str, dict[str, tuple[str, str]]] = {}
    for base, digests in releases:
        for file, digest in digests.items():
            if re.fullmatch(r"[0-9a-f]{64}", digest) is None:
                raise ValueError(f"{file}: {digest!r} is not a sha256 digest")
            if not file.endswith(".whl") or "/" in file:
                raise ValueError(f"{file!r} is not the name of a wheel")
            project = re.sub(r"[-_.]+", "-", Name.of(Path(file)).distribution).lower()
            known = projects.setdefault(project, {})
            if file in known and known[file][1] != digest:
                raise ValueError(f"{file} is released twice, with different contents")
            known.setdefault(file, (f"{base.rstrip('/')}/{quote(file)}", digest))
    found = {
        project: _page(
            f"Links for {project}",
            ((f"{url}#sha256={digest}", file) for file, (url, digest) in sorted(files.items())),
        )
        for project, files in projects.items()
    }
    found[""] = _page("Index of precast", ((f"{name}/", name) for name in sorted(projects)))
    return found


def _page(title: str, links: Iterable[tuple[str, str]]) -> str:
    lines = (f'<a href="{html.escape(href)}">{html.escape(text)}</a><br>' for href, text in links)
    return _PAGE.format(title=html.escape(title), links="\n".join(lines))


def publish(found: Mapping[str, str], link: Path) -> Path:
    """Write pages into a new folder and move ``link`` to it; return the folder.

    Raises
    ------
    ValueError
        If ``link`` exists and is not a link.
    """
    if link.exists() and not link.is_symlink():
        raise ValueError(f"{link} is no link to an index. Fix: move it away")
    text = "".join(f"{path}\0{page}\0" for path, page in sorted(found.items()))
    folder = link.with_name(f"{link.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    work = link.with_name(f".{folder.name}.{os.getpid()}")
    work.mkdir(parents=True)
    try:
        for path, page in found.items():
            (work / path).mkdir(exist_ok=True)
            (work / path / "index.html").write_text(page, encoding="utf-8")
        if not folder.exists():
            work.rename(folder)
        new = work.with_name(work.name + ".link")
        new.symlink_to(folder.name, target_is_directory=True)
        with contextlib.ExitStack() as stack:
            stack.callback(new.unlink, missing_ok=True)
            new.replace(link)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the package index of released wheels.")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the link to move")
    parser.add_argument(
        "--release",
        nargs=2,
        action="append",
        required=True,
        metavar=("URL", "SUMS"),
        help="address of the wheels of a release, and its SHA256SUMS",
    )
    args = parser.parse_args(argv)
    try:
        found = pages([(url, read_sums(Path(path))) for url, path in args.release])
        folder = publish(found, args.out)
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    print(f"{args.out} -> {folder.name}: {len(found) - 1} projects")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
