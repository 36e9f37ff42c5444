# SPDX-License-Identifier: Apache-2.0
"""Make an offline bundle: a folder of wheels that installs without a network.

The target is assumed to have torch, because torch is large and the engine chooses its build. torch
is neither downloaded nor looked up, unless the caller asks to include it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from precast._base.errors import BundleError
from precast.bundle._closure import Log, Pip, close
from precast.bundle._contents import core_plan
from precast.bundle._files import readme, script
from precast.bundle._target import Target, this_target
from precast.bundle._wheel import Wheel

__all__ = ["Bundle", "Target", "Wheel", "local_wheels", "make_bundle", "this_target"]

ASSUMED = "torch"


@dataclass
class Bundle:
    """The bundle that was made."""

    folder: Path
    target: Target
    wheels: list[Wheel]
    requirements: list[str]
    assumed: str | None
    notes: list[str] = field(default_factory=list)

    @property
    def core(self) -> Wheel:
        return next(wheel for wheel in self.wheels if wheel.name == "precast")

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
    beside: Iterable[Wheel] = (),
    with_torch: str | None = None,
    no_index: bool = False,
    log: Log = lambda text: None,
) -> Bundle:
    """Write the bundle into ``folder``, which must be empty or missing, and appears only complete.

    Parameters
    ----------
    archs : sequence of str
        Targets by folder name, such as ``["sm80", "sm90a"]``. Each comes from a local provider
        wheel that has it, otherwise from the extra ``cu<major>-<arch>`` of precast.
    version : str
        The version of precast to fetch if there is no local wheel of it.
    local : iterable of Wheel
        Wheels to use instead of fetching their projects.
    beside : iterable of Wheel
        Wheels to install beside precast, such as the package that stands in for FlashInfer.
    with_torch : str, optional
        The requirement of torch to include (``"torch"``, ``"torch==2.11.0"``); None leaves it out.

    Raises
    ------
    BundleError
        If a wheel cannot be found, does not suit the target, or does not belong to this precast.
        The folder is then unchanged.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BundleError(f"{folder} exists already and is not empty. Fix: name a new folder")
    beside = list(beside)
    by_name = _by_name([*local, *beside])
    providers, missing = _pick_providers(archs, cuda_major, by_name.values())
    names = {wheel.name for wheel in providers}
    mine = {n: w for n, w in by_name.items() if w.manifest is None or n in names}
    extras = [_extra(text) for text in extras]
    core_extras = [*extras, *(f"cu{cuda_major}-{arch}" for arch in missing)]
    core_version = str(mine["precast"].version) if "precast" in mine else version
    core = "precast" + (f"[{','.join(core_extras)}]" if core_extras else "")
    pinned = [f"{wheel.name}=={wheel.version}" for wheel in (*providers, *beside)]
    requirements = [f"{core}=={core_version}", *pinned]
    if with_torch is not None:
        requirements.append(_torch_requirement(with_torch))

    folder.parent.mkdir(parents=True, exist_ok=True)
    # Nobody else may put a wheel there: the folder above may be everybody's.
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (work / "wheels").mkdir()
        pip = Pip(target, work / "wheels", find_links, no_index, log)
        assumed = {ASSUMED} if with_torch is None else set()
        chosen, asked = close([Requirement(r) for r in requirements], mine, assumed, pip)
        bundle = Bundle(work, target, sorted(chosen.values()), requirements, asked.get(ASSUMED))
        _check_extras(bundle.core, extras)
        bundle.notes += _check_providers(bundle, archs, cuda_major)
        _write_files(bundle)
        if folder.exists():
            folder.rmdir()
        for made in (work, work / "wheels"):
            made.chmod(0o755)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    bundle.folder = folder
    bundle.wheels = [wheel.at(folder / "wheels" / wheel.path.name) for wheel in bundle.wheels]
    return bundle


# -- local wheels ---------------------------------------------------------------------------------


def local_wheels(files: Iterable[Path], folders: Iterable[Path]) -> list[Wheel]:
    """Return the named wheels, and the wheels of precast (core and providers) in the folders.

    A named wheel takes precedence over one that was found; of those the newest version is used.
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
    """Local providers that have the targets, and the targets that no provider has."""
    fitting = [w for w in wheels if w.manifest is not None and w.manifest.cuda_major == cuda_major]
    picked: dict[str, Wheel] = {}
    missing = []
    for arch in archs:
        holders = [w for w in fitting if w.manifest is not None and arch in w.manifest.archs]
        # The wheel with the fewest targets, so that a cluster gets only the targets that it needs.
        holders.sort(key=lambda w: len(w.manifest.archs) if w.manifest else 0)
        if not holders:
            missing.append(arch)
        elif not any(w.name in picked for w in holders):
            picked[holders[0].name] = holders[0]
    return list(picked.values()), missing


def _extra(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", text, re.ASCII) is None:
        raise BundleError(f"{text!r} is not the name of an extra of precast; legal example: jit")
    return text


def _torch_requirement(text: str) -> str:
    try:
        requirement = Requirement(text)
    except ValueError as error:
        raise BundleError(f"{text!r} is not a requirement: {error}") from None
    if canonicalize_name(requirement.name) != ASSUMED:
        raise BundleError(f"{text!r} is not a requirement of torch; legal example: torch==2.11.0")
    return text


# -- checks and files -----------------------------------------------------------------------------


def _check_extras(core: Wheel, extras: Iterable[str]) -> None:
    """Raise for an extra that does not exist, about which pip only warns."""
    for extra in extras:
        if canonicalize_name(extra) not in core.extras:
            raise BundleError(
                f"precast {core.version} has no extra {extra!r}; legal: "
                f"{', '.join(sorted(core.extras)) or 'none'}"
            )


def _check_providers(bundle: Bundle, archs: Sequence[str], cuda_major: int) -> list[str]:
    """Refuse providers that the core would refuse; return notes for the user."""
    core = bundle.core
    modules: dict[str, Any] = core_plan(core.path)["modules"]
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
            if manifest is None or manifest.cuda_major != cuda_major:
                continue
            if arch in manifest.archs:
                holders.append(wheel.path.name)
                held |= {row.name: row.fingerprint for row in manifest.modules if row.arch == arch}
        if not holders:
            raise BundleError(
                f"no wheel with prebuilt modules for {arch} (CUDA {cuda_major}): precast "
                f"{core.version} has no extra cu{cuda_major}-{arch} for one. Fix: name one with "
                f"--wheel"
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
                f"{len(absent)} of {len(planned)} planned modules for {arch} are not in the "
                f"bundle, such as {absent[0]}; the provider may be built for another profile"
            )
    notes += [
        f"{wheel.path.name} is tagged for the machine that it was built on, so it may not run with "
        f"an older glibc"
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
