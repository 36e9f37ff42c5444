# SPDX-License-Identifier: Apache-2.0
"""Make an offline bundle: a folder of wheels that installs without a network.

The closure is computed here, one wheel at a time, with every environment marker evaluated for the
*target* (pip's own resolver evaluates them for the Python it runs in). pip only downloads. torch is
assumed to be on the target unless it is asked for, so it is neither downloaded nor even looked up.
"""

from __future__ import annotations

import hashlib
import os
import platform as host_platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name
from packaging.version import Version

from precast._bundle_files import readme, script
from precast._wheel import Wheel
from precast.errors import BundleError

#: What the target is expected to have, because it is large and the engine chooses its build.
ASSUMED = "torch"
_MAX_ROUNDS = 25
_LEGACY_MANYLINUX = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}

Log = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """The machine that the bundle is for."""

    python: str
    platform: str

    def __post_init__(self) -> None:
        if re.fullmatch(r"3\.\d+", self.python) is None:
            raise BundleError(f"Python {self.python!r} is not a version; legal: such as 3.12")
        if re.fullmatch(r"(manylinux_2_\d+|linux)_[a-z0-9_]+", self.platform) is None:
            raise BundleError(
                f"platform {self.platform!r} is unknown; legal: such as manylinux_2_28_x86_64"
            )

    @property
    def machine(self) -> str:
        return re.sub(r"^(manylinux_2_\d+|linux)_", "", self.platform)

    @property
    def platforms(self) -> list[str]:
        """Every platform tag that the target accepts, best first."""
        found = []
        match = re.match(r"manylinux_2_(\d+)_", self.platform)
        for minor in range(int(match[1]), 4, -1) if match else ():
            found.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in _LEGACY_MANYLINUX:
                found.append(f"{_LEGACY_MANYLINUX[minor]}_{self.machine}")
        return [*found, f"linux_{self.machine}"]

    @property
    def tags(self) -> frozenset[Tag]:
        major, minor = map(int, self.python.split("."))
        interpreter = f"cp{major}{minor}"
        return frozenset(
            [
                *cpython_tags((major, minor), [interpreter], self.platforms),
                *compatible_tags((major, minor), interpreter, self.platforms),
            ]
        )

    @property
    def environment(self) -> dict[str, str]:
        """The values of environment markers on the target."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


def this_target() -> Target:
    """The Python that runs, on any Linux of the last years."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Target(python, f"manylinux_2_28_{host_platform.machine()}")


@dataclass
class Bundle:
    """What was made."""

    folder: Path
    target: Target
    wheels: list[Wheel]
    requirements: list[str]
    assumed: str | None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "directory": str(self.folder),
            "python": self.target.python,
            "platform": self.target.platform,
            "requirements": self.requirements,
            "assumed": self.assumed,
            "notes": self.notes,
            "wheels": [
                {
                    "name": wheel.name,
                    "version": str(wheel.version),
                    "file": f"wheels/{wheel.path.name}",
                    "size": wheel.path.stat().st_size,
                }
                for wheel in self.wheels
            ],
        }


def make_bundle(
    folder: Path,
    archs: Sequence[str],
    target: Target,
    *,
    cuda_major: int,
    version: str,
    local: Iterable[Wheel] = (),
    find_links: Sequence[str] = (),
    extras: Iterable[str] = (),
    with_torch: str | None = None,
    no_index: bool = False,
    log: Log = lambda text: None,
) -> Bundle:
    """Write the bundle into ``folder``, which must be empty or not there; it appears complete.

    Parameters
    ----------
    archs : sequence of str
        Targets by folder name, such as ``["sm80", "sm90a"]``. Each is taken from a local provider
        wheel that holds it, otherwise from the extra ``cu<major>-<arch>`` of precast.
    version : str
        The precast to fetch where no local wheel of it is given.
    local : iterable of Wheel
        Wheels to take instead of fetching those projects.
    with_torch : str, optional
        The requirement of torch to carry (``"torch"``, ``"torch==2.11.0"``); None leaves it out.

    Raises
    ------
    BundleError
        If a wheel cannot be had, does not suit the target, or does not belong to this precast. The
        folder is left as it was.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BundleError(f"{folder} is there already and is not empty. Fix: name a new folder")
    by_name = _by_name(local)
    providers, missing = _pick_providers(archs, cuda_major, by_name.values())
    names = {wheel.name for wheel in providers}
    mine = {n: w for n, w in by_name.items() if w.manifest is None or n in names}
    core_extras = [*extras, *(f"cu{cuda_major}-{arch}" for arch in missing)]
    core_version = str(mine["precast"].version) if "precast" in mine else version
    core = "precast" + (f"[{','.join(core_extras)}]" if core_extras else "")
    requirements = [f"{core}=={core_version}", *(f"{w.name}=={w.version}" for w in providers)]
    if with_torch is not None:
        requirements.append(_torch_requirement(with_torch))

    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.parent / f".{folder.name}.{os.getpid()}"
    try:
        (work / "wheels").mkdir(parents=True)
        pip = _Pip(target, work / "wheels", find_links, no_index, log)
        assumed = {ASSUMED} if with_torch is None else set()
        chosen, asked = _close([Requirement(r) for r in requirements], mine, assumed, pip)
        bundle = Bundle(work, target, sorted(chosen.values()), requirements, asked.get(ASSUMED))
        bundle.notes += _check_providers(bundle, archs, cuda_major)
        _write_files(bundle)
        if folder.exists():
            folder.rmdir()
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    bundle.folder = folder
    bundle.wheels = [wheel.at(folder / "wheels" / wheel.path.name) for wheel in bundle.wheels]
    return bundle


# -- local wheels ---------------------------------------------------------------------------------


def local_wheels(files: Iterable[Path], folders: Iterable[Path]) -> list[Wheel]:
    """The named wheels, and those of the project (core and providers) that lie in the folders.

    A wheel that is named wins over one that was found; among those the newest version wins.
    """
    named = [Wheel.read(path) for path in files]
    names = {wheel.name for wheel in named}
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise BundleError(f"{folder} is not a folder of wheels")
        wheels = (Wheel.read(path) for path in sorted(folder.glob("precast*.whl")))
        found += [w for w in wheels if w.name not in names and (w.name == "precast" or w.manifest)]
    return [*sorted(found), *named]


def _by_name(wheels: Iterable[Wheel]) -> dict[str, Wheel]:
    return {wheel.name: wheel for wheel in wheels}


def _pick_providers(
    archs: Sequence[str], cuda_major: int, wheels: Iterable[Wheel]
) -> tuple[list[Wheel], list[str]]:
    """Local providers that hold the targets, and the targets that none of them holds."""
    fitting = [w for w in wheels if w.manifest is not None and w.manifest.cuda_major == cuda_major]
    picked: dict[str, Wheel] = {}
    missing = []
    for arch in archs:
        holders = [w for w in fitting if w.manifest is not None and arch in w.manifest.archs]
        # The wheel with the fewest targets: a cluster does not want what it did not ask for.
        holders.sort(key=lambda w: len(w.manifest.archs) if w.manifest else 0)
        if not holders:
            missing.append(arch)
        elif not any(w.name in picked for w in holders):
            picked[holders[0].name] = holders[0]
    return list(picked.values()), missing


def _torch_requirement(text: str) -> str:
    try:
        requirement = Requirement(text)
    except ValueError as error:
        raise BundleError(f"{text!r} is not a requirement: {error}") from None
    if canonicalize_name(requirement.name) != ASSUMED:
        raise BundleError(f"{text!r} is not a requirement of torch; legal: such as torch==2.11.0")
    return text


# -- closure --------------------------------------------------------------------------------------


@dataclass
class _Wanted:
    specifier: SpecifierSet = field(default_factory=SpecifierSet)
    extras: set[str] = field(default_factory=set)
    asked_by: list[str] = field(default_factory=list)


def _close(
    roots: list[Requirement], local: Mapping[str, Wheel], assumed: set[str], pip: _Pip
) -> tuple[dict[str, Wheel], dict[str, str]]:
    """The wheels that ``roots`` need, and the requirements that the target must meet itself."""
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
        f"found in {_MAX_ROUNDS} rounds. Fix: give one of them by --wheel"
    )


def _gather(
    roots: list[Requirement], chosen: Mapping[str, Wheel], target: Target
) -> dict[str, _Wanted]:
    """What is wanted by the roots and by all chosen wheels that can be reached from them."""
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


def _take(wheel: Wheel, want: _Wanted, pip: _Pip) -> Wheel:
    """A local wheel, copied into the bundle if it fits."""
    if not _meets(wheel, want):
        raise BundleError(
            f"{wheel.path.name} does not meet what is asked by {'; '.join(want.asked_by)}"
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
class _Pip:
    """``pip download`` for the target."""

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
        told = [line for line in lines if line.startswith("ERROR:")] or lines[-3:]
        who = "; ".join(f"{name}: {', '.join(want.asked_by)}" for name, want in wanted.items())
        raise BundleError("pip could not fetch a wheel:\n" + "\n".join(told) + f"\nAsked by: {who}")


# -- checks and files -----------------------------------------------------------------------------


def _check_providers(bundle: Bundle, archs: Sequence[str], cuda_major: int) -> list[str]:
    """Refuse providers that the core would refuse; return what a person should know."""
    core = next(wheel for wheel in bundle.wheels if wheel.name == "precast")
    modules: dict[str, Any] = core.plan()["modules"]
    notes = []
    for arch in archs:
        planned = {
            name: rows[arch]
            for name, module in modules.items()
            if arch in (rows := module["fingerprints"].get(f"cu{cuda_major}", {}))
        }
        held: dict[str, str] = {}
        holders = []
        for wheel in bundle.wheels:
            manifest = wheel.manifest
            if manifest is not None and manifest.cuda_major == cuda_major and arch in manifest.archs:
                holders.append(wheel.path.name)
                held |= {row.name: row.fingerprint for row in manifest.modules if row.arch == arch}
        if not holders:
            raise BundleError(
                f"no wheel with prebuilt modules for {arch} (CUDA {cuda_major}): precast "
                f"{core.version} has no extra cu{cuda_major}-{arch} that brings one. Fix: give one "
                f"by --wheel"
            )
        other = [n for n, fingerprint in held.items() if planned.get(n, fingerprint) != fingerprint]
        if other:
            raise BundleError(
                f"{', '.join(holders)}: {len(other)} modules for {arch} (such as {other[0]}) were "
                f"built from other sources than precast {core.version}, which would not load them. "
                f"Fix: build core and provider from the same sources"
            )
        absent = sorted(set(planned) - set(held))
        if absent:
            notes.append(
                f"{len(absent)} of {len(planned)} planned modules for {arch} are not in the bundle, "
                f"such as {absent[0]} (another profile, perhaps)"
            )
    notes += [
        f"{wheel.path.name} is tagged for the machine it was built on; nothing says that it runs "
        f"with an older glibc"
        for wheel in bundle.wheels
        if bundle.target.platform.startswith("manylinux") and "-linux_" in wheel.path.name
    ]
    return notes


def _write_files(bundle: Bundle) -> None:
    folder = bundle.folder
    pins = "".join(f"{wheel.name}=={wheel.version}\n" for wheel in bundle.wheels)
    (folder / "constraints.txt").write_text(pins, encoding="utf-8")
    (folder / "requirements.txt").write_text(
        "".join(f"{line}\n" for line in bundle.requirements), encoding="utf-8"
    )
    bound = any(w.interpreter_bound for w in bundle.wheels)
    (folder / "install.sh").write_text(
        script(bundle.target.python if bound else None, bundle.target.machine, bundle.assumed),
        encoding="utf-8",
    )
    (folder / "install.sh").chmod(0o755)
    (folder / "README.md").write_text(
        readme(
            [(w.name, str(w.version), w.path.stat().st_size) for w in bundle.wheels],
            bundle.target.python,
            bundle.target.platform,
            bundle.assumed,
            bundle.notes,
        ),
        encoding="utf-8",
    )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = [f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


__all__ = ["Bundle", "Target", "local_wheels", "make_bundle", "this_target"]
