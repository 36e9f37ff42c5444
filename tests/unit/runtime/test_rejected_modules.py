# SPDX-License-Identifier: Apache-2.0
"""Every reason for which the loader rejects a module: the whole message and its fix."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from pathlib import Path

import pytest
import tvm_ffi
from cli_support import fake_library
from loader_support import BF16, messages, rejections, resolve

import precast
from precast._base import trust
from precast._base import tvm_ffi as _tvm_ffi
from precast._runtime import loader
from precast.errors import MissingKernelError

FILE = "sm90a/norm__dtype_bf16.so"
LABEL = "PRECAST_PROVIDER_PATH (p {version}, {file})"


def edit_row(root: Path, name: str = "norm__dtype_bf16", **changes: object) -> None:
    path = root / "manifest.json"
    data = json.loads(path.read_text())
    for row in data["modules"]:
        if row["name"] == name:
            row.update(changes)
    path.write_text(json.dumps(data))


def only_rejection(world, capability: str = "9.0") -> str:
    """The text for the one provider ``p``, which is not loaded, and which a call tells."""
    world.loader()
    found = resolve(capability=capability)
    assert found.path is None
    first = rejections(found)[0]
    device = {v: k for k, v in world.devices.items()}[capability]
    with pytest.raises(MissingKernelError) as caught:
        loader.loader.load("norm", BF16, device)
    assert f"\n  {first}\n" in str(caught.value)
    assert world.opened == []
    start = LABEL.format(version=precast.__version__, file=FILE)
    assert first.startswith(f"{start}: rejected: "), first
    return first[len(start) + len(": rejected: ") :]


def test_wrong_fingerprint(world):
    root = world.provide("p", "9.0")
    edit_row(root, fingerprint="f" * 64)
    assert only_rejection(world) == (
        f"its fingerprint ffffffffffff is not the {world.spec().fingerprint[:12]} of this precast "
        f"{precast.__version__}: it was built from other sources. Fix: build or unpack {root} again"
    )


def test_arch_does_not_serve_the_device(world):
    world.provide("p", "9.0")
    assert only_rejection(world, "8.6") == "sm90a serves 9.0, not 8.6"


def test_an_arch_or_module_that_is_not_planned(world):
    root = world.provide("p", "9.0")
    edit_row(root, arch="sm75", file="sm75/norm__dtype_bf16.so")
    world.loader()
    assert rejections(resolve())[0] == (
        f"PRECAST_PROVIDER_PATH (p {precast.__version__}, sm75/norm__dtype_bf16.so): rejected: "
        f"this precast {precast.__version__} does not plan norm__dtype_bf16 for sm75"
    )


def test_the_driver_is_too_old_for_the_cuda_major(world):
    world.provide("p", "9.0")
    world.driver = (12, 4)
    assert only_rejection(world) == (
        "needs driver >= 580 (CUDA 13); this driver runs CUDA 12.4. Fix: update the driver, or "
        "install the cu12 modules"
    )


def test_without_a_driver_nothing_is_rejected_for_it(world):
    root = world.provide("p", "9.0")
    world.driver = None
    world.loader()
    assert resolve().path == root / FILE


@pytest.mark.parametrize(
    "installed", ["0.1.14", "0.1.15rc1", "0.2.0rc1", "0.2.dev0", "0.2", "0.2.1", ""]
)
def test_tvm_ffi_outside_the_range(world, installed):
    world.provide("p", "9.0", tvm_ffi_min="0.1.15", tvm_ffi_max_exclusive="0.2")
    world.patch.setattr(_tvm_ffi, "version", lambda: installed)
    assert only_rejection(world) == (
        f"needs apache-tvm-ffi in [0.1.15, 0.2), installed is {installed or 'none'}. "
        f'Fix: pip install "apache-tvm-ffi>=0.1.15,<0.2"'
    )


@pytest.mark.parametrize("installed", ["0.1.15", "0.1.15.post2", "0.1.16rc1", "0.1.99"])
def test_tvm_ffi_inside_the_range(world, installed):
    root = world.provide("p", "9.0", tvm_ffi_min="0.1.15", tvm_ffi_max_exclusive="0.2")
    world.patch.setattr(_tvm_ffi, "version", lambda: installed)
    world.loader()
    assert resolve().path == root / FILE


def test_a_final_release_is_judged_without_packaging(monkeypatch):
    """Whose import costs more than the rest of a first call."""
    monkeypatch.setitem(sys.modules, "packaging.specifiers", None)
    for installed in ("0.1.15", "0.1.15.post2", "0.1.15.0", "0.1.99"):
        monkeypatch.setattr(_tvm_ffi, "version", lambda installed=installed: installed)
        assert _tvm_ffi.range_problem("0.1.15", "0.2") is None
    monkeypatch.setattr(_tvm_ffi, "version", lambda: "0.1.16rc1")
    with pytest.raises(ImportError):
        _tvm_ffi.range_problem("0.1.15", "0.2")


def test_a_tvm_ffi_range_that_is_no_range(world):
    world.provide("p", "9.0", tvm_ffi_min="old")
    assert only_rejection(world).startswith("its tvm-ffi range [old, 0.2) cannot be read (Invalid")


def test_another_machine(world):
    world.provide("p", "9.0", machine="sparc64")
    assert only_rejection(world) == f"built for sparc64, this machine is {platform.machine()}"


@pytest.mark.parametrize("place", [FILE, "sm90a", ".", "manifest.json"])
def test_a_world_writable_place(world, place):
    root = world.provide("p", "9.0")
    (root / place).chmod(0o777)
    where = root / place
    assert only_rejection(world) == f"{where} is world-writable. Fix: chmod o-w {where}"


def test_a_link_is_judged_by_where_it_leads(world, tmp_path):
    root = world.provide("p", "9.0")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root / FILE).rename(elsewhere / "m.so")
    (root / FILE).symlink_to(elsewhere / "m.so")
    elsewhere.chmod(0o777)
    assert only_rejection(world).startswith(f"{elsewhere} is world-writable")


@pytest.mark.parametrize("open_place", ["sm90a", "."])
def test_a_link_is_judged_by_where_it_lies_too(world, tmp_path, open_place):
    root = world.provide("p", "9.0")
    elsewhere = tmp_path / "elsewhere/sm90a"
    elsewhere.mkdir(parents=True)
    (root / FILE).rename(elsewhere / "m.so")
    (root / FILE).symlink_to(elsewhere / "m.so")
    world.loader()
    assert resolve().path == root / FILE
    (root / open_place).chmod(0o777)
    assert only_rejection(world).startswith(f"{root / open_place} is world-writable")


def test_an_ancestor_that_anybody_can_write(world, tmp_path):
    root = world.provide("p", "9.0")
    world.folder.chmod(0o777)
    where = root.parent
    assert only_rejection(world) == f"{where} is world-writable. Fix: chmod o-w {where}"


def test_a_sticky_folder_holds_trusted_providers_and_others(world):
    root = world.provide("p", "9.0")
    world.folder.chmod(0o1777)
    world.loader()
    assert resolve().path == root / FILE
    if os.geteuid() == 0:
        os.lchown(root, 2002, 2002)
        assert only_rejection(world).startswith(f"{root} belongs to user 2002; trusted are root, ")


@pytest.mark.parametrize("place", [FILE, "sm90a", ".", "manifest.json"])
def test_files_of_another_user(world, place):
    root = world.provide("p", "9.0")
    real = Path.stat

    def of_another(self, **options):
        status = real(self, **options)
        return os.stat_result([*status[:4], 2002, *status[5:]]) if self == root / place else status

    world.patch.setattr(Path, "stat", of_another)
    assert only_rejection(world).startswith(
        f"{root / place} belongs to user 2002; trusted are root"
    )


@pytest.mark.parametrize("way", ["theirs/p", "mine/../theirs/p", "link/p"])
def test_a_folder_of_another_user_in_a_sticky_one(world, way):
    root = world.provide("theirs/p", "9.0")
    shared = world.folder
    (shared / "mine").mkdir()
    (shared / "link").symlink_to("mine/../theirs")
    shared.chmod(0o1777)
    world.patch.setenv("PRECAST_PROVIDER_PATH", str(shared / way))
    world.loader()
    assert resolve().path is not None
    real = Path.lstat

    def of_another(self):
        status = real(self)
        is_theirs = self == root.parent
        return os.stat_result([*status[:4], 2002, *status[5:]]) if is_theirs else status

    world.patch.setattr(Path, "lstat", of_another)
    found = resolve()
    assert found.path is None
    assert f"{root.parent} belongs to user 2002, and {shared} is" in rejections(found)[0]


def test_the_owner_of_precast_is_trusted(world):
    world.patch.setattr(trust, "_owner_of_precast", lambda: 2002)
    assert trust.trusted_users() == {0, os.geteuid(), 2002}


def test_a_link_to_itself(world):
    root = world.provide("p", "9.0")
    (root / FILE).unlink()
    (root / FILE).symlink_to(root / FILE)
    assert only_rejection(world).startswith(f"{root / FILE} cannot be read (Too many levels")


def test_a_changed_file(world):
    root = world.provide("p", "9.0")
    data = bytearray((root / FILE).read_bytes())
    data[-1] ^= 1
    (root / FILE).write_bytes(data)
    assert only_rejection(world) == (
        f"norm__dtype_bf16.so was changed after it was built (sha256 differs). Fix: build or "
        f"unpack {root} again"
    )


#: Why not the interpreter: some are no shared object.
LIBRARY = Path(tvm_ffi.__file__).parent / "lib" / "libtvm_ffi.so"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"#!/bin/sh\n" * 20, "is not a 64-bit shared library"),
        (b"\x7fELF\x01" + bytes(99), "is not a 64-bit shared library"),
        (fake_library("x", ["rmsnorm"])[:30], "is not a 64-bit shared library"),
        (fake_library("another library"), "has no function "),
        (fake_library("x", machine=243), "is built for ELF machine 243, not for "),
        (LIBRARY.read_bytes()[:4096], "breaks off after 4096 of "),
    ],
)
def test_a_file_that_is_no_library_of_ours_is_never_opened(world, data, problem):
    """The manifest was made from it: its size and digest fit."""
    root = world.provide("p", "9.0")
    (root / FILE).write_bytes(data)
    edit_row(root, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    text = only_rejection(world)
    assert text.startswith(f"norm__dtype_bf16.so {problem}")
    assert text.endswith(f". Fix: build or unpack {root} again")


def test_a_truncated_file(world):
    root = world.provide("p", "9.0")
    size = (root / FILE).stat().st_size
    (root / FILE).write_bytes(b"x")
    assert only_rejection(world) == (
        f"norm__dtype_bf16.so has 1 bytes instead of {size}: truncated. Fix: build or unpack "
        f"{root} again"
    )


def test_a_file_that_is_gone(world):
    root = world.provide("p", "9.0")
    (root / FILE).unlink()
    assert only_rejection(world) == f"{root / FILE} cannot be read (No such file or directory)"


def test_the_fix_of_an_installed_provider_is_a_pip_command(world):
    root = world.install("cache-cu13-sm90a", "9.0", version="1.2")
    (root / FILE).write_bytes(b"x")
    world.loader()
    assert rejections(resolve())[0].endswith(
        ": truncated. Fix: pip install --force-reinstall --no-deps cache-cu13-sm90a==1.2"
    )


def test_a_module_that_the_provider_does_not_hold(world):
    root = world.provide("p", "9.0")
    data = json.loads((root / "manifest.json").read_text())
    data["modules"] = [row for row in data["modules"] if "bf16" not in row["name"]]
    (root / "manifest.json").write_text(json.dumps(data))
    world.loader()
    text = f"PRECAST_PROVIDER_PATH (p {precast.__version__})"
    assert rejections(resolve())[0] == f"{text}: rejected: does not hold norm__dtype_bf16"


# -- manifests that cannot be read: told, and never an import failure -----------------------------


def manifest(root: Path, **changes: object) -> dict:
    return {**json.loads((root / "manifest.json").read_text()), **changes}


DAMAGE = {
    "not JSON": (lambda root: "{", "is damaged (not JSON)"),
    "not text": (lambda root: "\udcff", "is damaged (not JSON)"),
    "a list": (lambda root: [], "has schema None, this precast reads 1"),
    "another schema": (lambda root: manifest(root, schema=2), "has schema 2, this precast reads 1"),
    "no modules": (
        lambda root: {k: v for k, v in manifest(root).items() if k != "modules"},
        "is damaged ('modules' is missing or wrong)",
    ),
    "modules of a wrong type": (
        lambda root: manifest(root, modules=None),
        "is damaged ('modules' is missing or wrong)",
    ),
    "CUDA major as text": (
        lambda root: manifest(root, cuda_major="13"),
        "is damaged ('cuda_major' is missing or wrong)",
    ),
    "a schema that is true": (
        lambda root: manifest(root, schema=True),
        "has schema True, this precast reads 1",
    ),
    "a row that is a number": (
        lambda root: manifest(root, modules=[3]),
        "is damaged ('modules' is missing or wrong)",
    ),
    "a row without a fingerprint": (
        lambda root: manifest(
            root, modules=[{**manifest(root)["modules"][0], "fingerprint": None}]
        ),
        "is damaged ('fingerprint' is missing or wrong)",
    ),
    "a file outside the provider": (
        lambda root: manifest(
            root, modules=[{**manifest(root)["modules"][0], "file": "../../other.so"}]
        ),
        "is damaged ('file' is missing or wrong)",
    ),
    "the file of another module": (
        lambda root: manifest(
            root, modules=[{**manifest(root)["modules"][0], "file": "sm90a/scale__dtype_f32.so"}]
        ),
        "is damaged ('file' is missing or wrong)",
    ),
    "a target that leads out of the provider": (
        lambda root: manifest(
            root, modules=[{**manifest(root)["modules"][0], "arch": "..", "file": "../x.so"}]
        ),
        "is damaged ('arch' is missing or wrong)",
    ),
    "a name that leads out of the provider": (
        lambda root: manifest(
            root,
            modules=[{**manifest(root)["modules"][0], "name": "../x", "file": "sm90a/../x.so"}],
        ),
        "is damaged ('name' is missing or wrong)",
    ),
    "exports of a wrong type": (
        lambda root: manifest(root, modules=[{**manifest(root)["modules"][0], "exports": "f"}]),
        "is damaged ('exports' is missing or wrong)",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_manifest(world, name, caplog):
    root = world.provide("p", "9.0")
    make, words = DAMAGE[name]
    made = make(root)
    text = made if isinstance(made, str) else json.dumps(made)
    (root / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    world.loader()
    text = (
        f"PRECAST_PROVIDER_PATH ({root}): rejected: {root}/manifest.json {words}. "
        f"Fix: correct PRECAST_PROVIDER_PATH"
    )
    assert rejections(resolve())[0] == text
    world.cached(world.spec())
    loader.loader.load("norm", BF16, 0)
    assert messages(caplog) == [text]


def test_a_configured_path_without_a_manifest(world, tmp_path):
    world.patch.setenv("PRECAST_KERNEL_DIR", str(tmp_path / "none"))
    world.loader()
    assert rejections(resolve())[0] == (
        f"PRECAST_KERNEL_DIR ({tmp_path}/none): rejected: {tmp_path}/none/manifest.json cannot be "
        f"read (No such file or directory). Fix: correct PRECAST_KERNEL_DIR"
    )


@pytest.mark.parametrize("variable", ["PRECAST_KERNEL_DIR", "PRECAST_PROVIDER_PATH"])
def test_the_home_of_a_user_that_does_not_exist(world, tmp_path, monkeypatch, variable):
    monkeypatch.chdir(tmp_path)
    world.patch.setenv(variable, "~no-such-user/x")
    world.loader()
    assert rejections(resolve())[0] == (
        f"{variable} ({tmp_path}/~no-such-user/x): rejected: "
        f"{tmp_path}/~no-such-user/x/manifest.json cannot be read (No such file or directory). "
        f"Fix: correct {variable}"
    )


def test_an_installed_provider_whose_manifest_is_gone(world):
    root = world.install("cache-cu13-sm90a", "9.0")
    (root / "manifest.json").unlink()
    world.loader()
    assert rejections(resolve())[0] == (
        f"provider ({root}): rejected: {root}/manifest.json cannot be read (No such file or "
        f"directory). Fix: reinstall it"
    )


# -- the JIT cache of the user --------------------------------------------------------------------


def cache_rejection(world) -> str:
    world.patch.setenv("PRECAST_JIT", "error")
    world.loader()
    found = resolve()
    assert found.path is None
    step = next(s for s in found.steps if s.source == "JIT cache")
    return step.reason


def test_a_cache_of_another_user(world):
    path = world.cached(world.spec())
    world.patch.setattr(os, "geteuid", lambda: 4242)
    owner = path.stat().st_uid
    assert cache_rejection(world) == (
        f"{path} belongs to user {owner}, not to this user (4242). Fix: use a cache directory of "
        f"your own, or ship the modules by PRECAST_PROVIDER_PATH"
    )


def test_a_world_writable_cache(world):
    path = world.cached(world.spec())
    path.parent.chmod(0o777)
    assert cache_rejection(world).startswith(f"{path.parent} is world-writable. Fix: chmod")


def test_a_world_writable_cached_record(world):
    path = world.cached(world.spec()).with_name("meta.json")
    path.chmod(0o666)
    assert cache_rejection(world).startswith(f"{path} is world-writable. Fix: chmod")


@pytest.mark.parametrize("name", ["norm__dtype_bf16.so", "meta.json"])
def test_a_link_in_the_cache(world, tmp_path, name):
    path = world.cached(world.spec()).with_name(name)
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    assert cache_rejection(world) == (
        f"{path} is a symbolic link, which the cache never holds. Fix: remove it"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 3}, "has 6 bytes instead of 3: truncated. Fix: precast cache clear"),
        ({"sha256": "0" * 64}, "was changed after it was built (sha256 differs). Fix: precast"),
        ({"fingerprint": "0" * 64}, "built from other sources or flags (its fingerprint differs)"),
        ({"schema": 9}, "meta.json cannot be read (not a meta.json of this version). Fix: precast"),
        ({"more": 1}, "meta.json cannot be read (not a meta.json of this version). Fix: precast"),
    ],
)
def test_a_damaged_cached_build(world, changes, words):
    world.cached(world.spec(), **changes)
    assert words in cache_rejection(world)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\xff"])
def test_a_foreign_meta_json(world, text):
    path = world.cached(world.spec())
    (path.parent / "meta.json").write_text(text, encoding="latin-1")
    assert "meta.json cannot be read" in cache_rejection(world)


def test_a_cached_build_of_a_tvm_ffi_that_no_longer_fits(world):
    world.cached(world.spec())
    world.patch.setattr(_tvm_ffi, "version", lambda: "0.9")
    low, high = world.spec().tvm_ffi_range
    words = f"needs apache-tvm-ffi in [{low}, {high}), installed is 0.9"
    assert cache_rejection(world).startswith(words)


def test_a_cached_build_of_another_machine_is_not_even_seen(world, monkeypatch):
    world.cached(world.spec())
    uname = os.uname()
    other = os.uname_result((*uname[:4], "aarch64" if uname.machine == "x86_64" else "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: other)
    assert cache_rejection(world) == "holds no build of norm__dtype_bf16"
