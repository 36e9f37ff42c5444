# SPDX-License-Identifier: Apache-2.0
"""A set of wheels is published whole and sound, or not at all."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from build_support import PROFILE, ROOT, run
from ci_support import script
from wheel_support import respoil

import precast
from precast._plan.planner import Plan
from precast._runtime.manifest import MANIFEST_NAME

release_check = script("release_check")
MODULES = "precast_jit_cache_cu13_sm80"
MODULE = f"{MODULES}/sm80/scale__dtype_f32.so"
#: This machine builds for its own C library; the release is built in the manylinux image.
OWN = {"max_glibc": "99", "max_glibcxx": "99"}

Problems = Callable[..., str]


@pytest.fixture
def folder(small_core: Path, sm80: Path, tmp_path: Path) -> Path:
    """A set of two good wheels."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    for wheel in (small_core, sm80):
        shutil.copy(wheel, folder)
    return folder


@pytest.fixture
def problems(small_plan: Plan) -> Problems:
    """Check a set; the problems, one in each line."""

    def check(folder: Path, **options: object) -> str:
        found = release_check.check_set(folder, small_plan, PROFILE, **{**OWN, **options})
        return "\n".join(f"{name}: {line}" for name, lines in found.items() for line in lines)

    return check


def wheel_of(folder: Path, name: str = MODULES) -> Path:
    (wheel,) = folder.glob(f"{name}-*.whl")
    return wheel


def test_a_good_set_passes_and_gets_its_sums(
    folder: Path, checkout: Path, problems: Problems
) -> None:
    assert problems(folder) == ""
    argv = [sys.executable, checkout / "ci" / "release_check.py", "--profile", PROFILE]
    argv += ["--max-glibc", "99", "--max-glibcxx", "99"]
    out = run([*argv, "--write-sums", "--tag", f"v{precast.__version__}", folder])
    assert out.count(": ok") == 3
    run(["env", "-C", folder, "sha256sum", "--check", "--strict", "SHA256SUMS"])
    assert problems(folder) == ""
    out = run([*argv, "--tag", "v9.9.9", folder], fails=True)
    assert f"the tag is v9.9.9, the version {precast.__version__}" in out


def test_an_incomplete_set_is_rejected_when_it_must_be_whole(
    folder: Path, problems: Problems
) -> None:
    out = problems(folder, complete=True)
    machine = os.uname().machine
    assert "the set: precast-jit-cache-cu12-sm90a for aarch64: missing" in out
    assert f"precast-jit-cache-cu13-sm80 for {machine}: missing" not in out
    assert "sm110a for aarch64: missing" in out
    assert "cu12-sm110a" not in out
    wheel_of(folder, "precast").unlink()
    assert "the set: precast for any: missing" in problems(folder, complete=True)


def _drop_module(wheel: Path) -> None:
    _spoil(wheel, MODULE, None)


def _truncate_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(MODULE)
    _spoil(wheel, MODULE, data[:-1] + b"\1")


def _damage_manifest(wheel: Path) -> None:
    _spoil(wheel, MANIFEST_NAME, b"{}")


def _empty_record(wheel: Path) -> None:
    _spoil(wheel, "RECORD", b"")


def _another_version(wheel: Path) -> None:
    wheel.rename(wheel.with_name(wheel.name.replace(precast.__version__, "9.9.9")))


def _another_machine(wheel: Path) -> None:
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[os.uname().machine]
    wheel.rename(wheel.with_name(wheel.name.replace(os.uname().machine, other)))


def _another_name(wheel: Path) -> None:
    wheel.rename(wheel.with_name(wheel.name.replace("sm80", "sm81")))


def _twice(wheel: Path) -> None:
    machine = os.uname().machine
    name = wheel.name.replace(f"linux_{machine}", f"manylinux_2_99_{machine}")
    shutil.copy(wheel, wheel.with_name(name))


def _spoil(wheel: Path, name: str, data: bytes | None) -> None:
    spoilt = respoil(wheel, wheel.parents[1], name, data)
    spoilt.replace(wheel)


TAMPERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a module is gone": (_drop_module, f"{MODULE}: in RECORD, but missing"),
    "a module is another": (_truncate_module, "size or sha256 is not that of the manifest"),
    "the manifest is empty": (_damage_manifest, "has schema None"),
    "RECORD is empty": (_empty_record, f"{MODULE}: not in RECORD"),
    "another version": (_another_version, "version 9.9.9; this checkout is"),
    "another machine": (_another_machine, "its tag names another machine"),
    "a target that nobody planned": (_another_name, "ci/matrix.py does not list it"),
    "two of one": (_twice, "2 wheels, one is planned"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_set_is_rejected(folder: Path, name: str, problems: Problems) -> None:
    tamper, text = TAMPERED[name]
    tamper(wheel_of(folder))
    assert text in problems(folder)


def test_what_was_changed_with_record_and_manifest_is_still_rejected(
    folder: Path, problems: Problems
) -> None:
    """Somebody who corrects RECORD, too, cannot make a module that the plan does not know."""
    wheel = wheel_of(folder)
    with zipfile.ZipFile(wheel) as archive:
        manifest = archive.read(f"{MODULES}/{MANIFEST_NAME}")
        (record,) = [n for n in archive.namelist() if n.endswith("RECORD")]
        rows = archive.read(record)
    changed = manifest.replace(b'"libc.so.6"', b'"libc.so.6",\n    "libevil.so"', 1)
    assert changed != manifest
    rows = rows.replace(_digest(manifest), _digest(changed))
    _spoil(wheel, MANIFEST_NAME, changed)
    _spoil(wheel, "RECORD", rows)
    out = problems(folder)
    assert "RECORD" not in out
    assert "exports, needed or sass differ from the manifest" in out


def _digest(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")


def test_sums_that_do_not_fit_are_rejected(folder: Path, problems: Problems) -> None:
    wheels = list(folder.glob("*.whl"))
    sums = folder / release_check.SUMS
    good = release_check.sums(wheels)
    sums.write_text(good)
    assert problems(folder) == ""
    sums.write_text(good.splitlines()[0] + "\n" + "0" * 64 + "  unexpected.whl\n")
    out = problems(folder)
    assert "not in SHA256SUMS" in out
    assert "unexpected.whl: in SHA256SUMS, but missing" in out
    sums.write_text("".join(f"{'0' * 64}  {wheel.name}\n" for wheel in wheels))
    assert problems(folder).count("its digest is not that of SHA256SUMS") == 2


def test_the_floor_of_the_release_holds_for_every_wheel(folder: Path, problems: Problems) -> None:
    out = problems(folder, max_glibc="2.2")
    assert f"{wheel_of(folder).name}: sm80/scale__dtype_f32.so: needs GLIBC_" in out
    assert problems(folder, max_glibcxx="3.4.1")
    assert (release_check.MAX_GLIBC, release_check.MAX_GLIBCXX) == ("2.28", "3.4.24")


def test_repair_gives_the_tag_and_nothing_else(
    sm80: Path, small_plan: Plan, tmp_path: Path
) -> None:
    """auditwheel takes no library in, leaves the modules alone, and does it the same way twice."""
    libc, machine = os.confstr("CS_GNU_LIBC_VERSION"), os.uname().machine
    assert libc is not None
    tag = f"manylinux_{libc.split()[1].replace('.', '_')}_{machine}"
    repaired = []
    for umask in (0o022, 0o077):
        out = tmp_path / str(umask)
        old = os.umask(umask)
        try:
            run([ROOT / "ci" / "repair_wheel.sh", sm80, out], {"PLAT": tag})
        finally:
            os.umask(old)
        (wheel,) = out.glob("*.whl")
        repaired.append(wheel)
    assert repaired[0].name == sm80.name.replace(f"linux_{machine}", tag)
    assert repaired[0].read_bytes() == repaired[1].read_bytes()
    with zipfile.ZipFile(sm80) as old_wheel, zipfile.ZipFile(repaired[0]) as new_wheel:
        libraries = {n for n in old_wheel.namelist() if ".so" in n}
        assert {n for n in new_wheel.namelist() if ".so" in n} == libraries
        assert all(old_wheel.read(n) == new_wheel.read(n) for n in libraries)
    assert script("check_wheel").check_wheel(repaired[0], small_plan, PROFILE) == []
