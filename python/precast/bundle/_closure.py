# SPDX-License-Identifier: Apache-2.0
"""Find the wheels that a set of requirements needs on the target.

Every environment marker is evaluated for the target (pip's own resolver evaluates them for the
Python it runs in); pip only downloads, one wheel a project.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from precast._base.errors import BundleError
from precast.bundle._target import Target
from precast.bundle._wheel import Wheel

_MAX_ROUNDS = 25

Log = Callable[[str], None]


@dataclass
class _Wanted:
    specifier: SpecifierSet = field(default_factory=SpecifierSet)
    asked_by: list[str] = field(default_factory=list)


def close(
    roots: list[Requirement], local: Mapping[str, Wheel], assumed: set[str], pip: Pip
) -> tuple[dict[str, Wheel], dict[str, str]]:
    """The wheels that ``roots`` need, and the requirements that the target must have already."""
    chosen: dict[str, Wheel] = {}
    for _ in range(_MAX_ROUNDS):
        wanted = _gather(roots, chosen, pip.target)
        asked = {n: n + str(wanted.pop(n).specifier) for n in assumed if n in wanted}
        todo = {
            name: want
            for name, want in wanted.items()
            if name not in chosen or not _meets(chosen[name], want)
        }
        if not todo:
            return {name: chosen[name] for name in wanted}, asked
        for name in [name for name in todo if name in local]:
            chosen[name] = _take(local[name], todo.pop(name), pip)
        if todo:
            chosen |= pip.download(todo)
    raise BundleError(
        f"the requirements of {', '.join(todo)} contradict one another: no set of versions was "
        f"found in {_MAX_ROUNDS} rounds. Fix: name one of them with --wheel"
    )


def _gather(
    roots: list[Requirement], chosen: Mapping[str, Wheel], target: Target
) -> dict[str, _Wanted]:
    """The requirements of the roots and of all chosen wheels that can be reached from them."""
    wanted: dict[str, _Wanted] = {}
    queue = [(requirement, "the bundle") for requirement in roots]
    expanded: set[tuple[str, str]] = set()
    while queue:
        requirement, parent = queue.pop(0)
        name = canonicalize_name(requirement.name)
        want = wanted.setdefault(name, _Wanted())
        want.specifier &= requirement.specifier
        want.asked_by.append(f"{parent} ({requirement})")
        for extra in ("", *map(canonicalize_name, requirement.extras)):
            if name in chosen and (name, extra) not in expanded:
                expanded.add((name, extra))
                wheel = chosen[name]
                queue += [
                    (child, f"{wheel.name} {wheel.version}")
                    for child in wheel.requires_for(extra, target.environment)
                ]
    return wanted


def _meets(wheel: Wheel, want: _Wanted) -> bool:
    return want.specifier.contains(wheel.version, prereleases=True)


def _take(wheel: Wheel, want: _Wanted, pip: Pip) -> Wheel:
    """Copy a local wheel into the bundle if it fits."""
    if not _meets(wheel, want):
        raise BundleError(
            f"{wheel.path.name} does not meet the requirement of {'; '.join(want.asked_by)}"
        )
    problem = wheel.unsuitable(pip.target.tags, pip.target.python)
    if problem is not None:
        raise BundleError(
            f"{wheel.path.name} {problem}; the bundle is for Python {pip.target.python} on "
            f"{pip.target.platform}"
        )
    pip.log(f"taking {wheel.path.name}")
    return wheel.at(Path(shutil.copy(wheel.path, pip.folder)))


@dataclass
class Pip:
    """Run ``pip download`` for the target."""

    target: Target
    folder: Path
    find_links: Sequence[str]
    no_index: bool
    log: Log

    def download(self, wanted: Mapping[str, _Wanted]) -> dict[str, Wheel]:
        for name in wanted:
            for old in self._files(name):
                old.unlink()
        requirements = [f"{name}{want.specifier}" for name, want in wanted.items()]
        self.log(f"fetching {', '.join(requirements)}")
        self._run(requirements, wanted)
        return {name: Wheel.read(self._files(name)[0]) for name in wanted}

    def _files(self, name: str) -> list[Path]:
        return [
            path
            for path in self.folder.glob("*.whl")
            if canonicalize_name(path.name.partition("-")[0]) == name
        ]

    def _run(self, requirements: list[str], wanted: Mapping[str, _Wanted]) -> None:
        argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        argv += ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
        argv += [f"--dest={self.folder}", f"--python-version={self.target.python}"]
        argv += ["--implementation=cp", *(f"--platform={p}" for p in self.target.platforms)]
        argv += [f"--find-links={place}" for place in self.find_links]
        argv += ["--no-index"] if self.no_index else []
        done = subprocess.Popen(
            [*argv, "--", *requirements],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.stdout is not None
        lines = []
        for line in done.stdout:
            lines.append(line.rstrip())
            if line.lstrip().startswith("Downloading "):
                self.log(line.strip())
        if done.wait() == 0:
            return
        problems = [line for line in lines if line.startswith("ERROR:")] or lines[-3:]
        who = "; ".join(f"{name}: {', '.join(want.asked_by)}" for name, want in wanted.items())
        raise BundleError(
            "pip could not fetch a wheel:\n" + "\n".join(problems) + f"\nRequired by: {who}"
        )
