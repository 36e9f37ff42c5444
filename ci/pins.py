#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that workflows use no third-party code that can change unnoticed.

::

    python ci/pins.py            # the actions in use; exit status 1 if one is not pinned
    python ci/pins.py --verify   # ask GitHub whether each commit is the release in its comment

An action is pinned by the full hash of a commit, with its release as a comment:
``uses: actions/checkout@<40 digits> # v6.0.2``. The same action has one pin in all workflows.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_USES = re.compile(r"^\s*(?:-\s*)?uses:\s*(\S+)\s*(?:#\s*(\S+))?", re.MULTILINE)
_PIN = re.compile(r"([\w.-]+/[\w.-]+)(?:/[\w./-]+)?@([0-9a-f]{40})")


def problems(texts: dict[str, str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The pins of the workflows, ``{action: (commit, release)}``, and their problems."""
    pins: dict[str, tuple[str, str]] = {}
    found = []
    for file, text in texts.items():
        for uses, release in _USES.findall(text):
            if uses.startswith("./"):
                continue
            match = _PIN.fullmatch(uses)
            if match is None:
                found.append(f"{file}: {uses} is not pinned by the full hash of a commit")
            elif re.fullmatch(r"v\d+\.\d+\.\d+", release) is None:
                found.append(f"{file}: {uses} has no comment with its release, such as # v1.2.3")
            elif pins.setdefault(match[1], (match[2], release)) != (match[2], release):
                found.append(f"{file}: {match[1]} has another pin elsewhere")
    return pins, found


def moved(action: str, commit: str, release: str) -> str | None:
    """The problem if GitHub's tag ``release`` of ``action`` is not ``commit``."""
    url = f"https://github.com/{action}"
    argv = ["git", "ls-remote", "--exit-code", url, f"refs/tags/{release}*"]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        return f"{action}: {release} was not found: {done.stderr.strip()}"
    commits = dict(reversed(line.split("\t")) for line in done.stdout.splitlines())
    tag = f"refs/tags/{release}"
    got = commits.get(f"{tag}^{{}}", commits.get(tag))
    return None if got == commit else f"{action}: {release} is {got}, the workflows have {commit}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the pins of the workflows.")
    parser.add_argument("--verify", action="store_true", help="ask GitHub; needs a network")
    args = parser.parse_args(argv)
    files = sorted((ROOT / ".github").rglob("*.yml"))
    pins, found = problems({f.name: f.read_text(encoding="utf-8") for f in files})
    if args.verify:
        found += filter(None, (moved(action, *pin) for action, pin in pins.items()))
    for action, (commit, release) in sorted(pins.items()):
        print(f"{action} {release} {commit}")
    print("\n".join(found) or "every action is pinned")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
