# SPDX-License-Identifier: Apache-2.0
"""A cache on a read-only, foreign or full file system, and builds there that are not sound."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from jit_support import compiles, failure, in_namespace, run, success, taking, worker_command


def at(cache: Path, setup: str, tiny: Path) -> list[str]:
    """A worker whose cache directory is prepared by ``setup`` in a mount namespace."""
    cache.mkdir(exist_ok=True)
    return in_namespace(setup.format(cache=cache), worker_command(tiny))


# -- read-only ------------------------------------------------------------------------------------

READ_ONLY = "mount --bind {cache} {cache}; mount -o remount,ro,bind {cache}"


def test_a_read_only_cache_is_an_error_before_anything_is_compiled(
    tiny, cache, fake, mounts, tmp_path
):
    text = failure(run(at(cache, READ_ONLY, tiny), fake))
    assert text == (
        f"precast.errors.CacheDirectoryError: PRECAST_CACHE_DIR={cache} cannot be written "
        f"(Read-only file system). Nothing was compiled. Fix: point it to a directory of yours on "
        f"a writable file system, or install the prebuilt modules (see: precast doctor)"
    )
    assert not (tmp_path / "fake" / "log").exists()
    assert list(cache.iterdir()) == []


def test_what_lies_in_a_read_only_cache_is_used(tiny, cache, fake, mounts):
    path = success(run(worker_command(tiny), fake))
    done = run(at(cache, READ_ONLY, tiny), fake)
    assert (success(done), compiles(done), done.stderr) == (path, 0, "")


def test_a_read_only_home_gets_a_private_folder_with_a_word(tiny, fake, mounts, tmp_path):
    home = tmp_path / "home"
    env = {**fake, "HOME": str(home), "TMPDIR": str(tmp_path)}
    del env["PRECAST_CACHE_DIR"]
    done = run(at(home, READ_ONLY, tiny), env)
    path = success(done)
    assert path.is_relative_to(tmp_path)
    assert (
        f"WARNING: the cache directory {home}/.cache/precast/v1 cannot be written; modules"
        in done.stderr
    )
    assert not path.exists()
    assert list(tmp_path.glob("precast-cache-*")) == []


@pytest.fixture
def public():
    """A folder that an ordinary user can enter; the test's own may be private."""
    folder = Path(tempfile.mkdtemp(prefix="precast-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_ordinary_user(argv: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return argv
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("running as root and setpriv is not there")
    command = [setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", *argv]
    if run([*command[:4], sys.executable, "-c", "import precast"], fake_env()).returncode != 0:
        pytest.skip("an ordinary user may not read this checkout or its Python")
    return command


def fake_env() -> dict[str, str]:
    from jit_support import environment

    return environment()


def published(public: Path, tiny: Path, fake: dict[str, str]) -> tuple[Path, dict[str, str]]:
    """Copies of sources and compilers that every user can read."""
    root = tiny.parent
    shutil.copytree(tiny, public / "tiny")
    shutil.copytree(root / "fake", public / "fake")
    moved = {k: v.replace(str(root), str(public)) for k, v in fake.items()}
    for name in ("cuda/bin/nvcc", "g++"):
        path = public / "fake" / name
        path.write_text(path.read_text().replace(str(root), str(public)))
    return public / "tiny", taking(moved, 0.03, log="/dev/null")


def test_a_cache_without_permission(tiny, fake, public):
    source, env = published(public, tiny, fake)
    cache = public / "cache"
    cache.mkdir(mode=0o755)
    if os.geteuid() != 0:
        cache.chmod(0o555)
    text = failure(run(as_ordinary_user(worker_command(source)), env))
    assert f"PRECAST_CACHE_DIR={cache} cannot be written (Permission denied). Nothing was" in text
    assert list(cache.iterdir()) == []


def test_the_cache_of_another_user_is_not_loaded(tiny, fake, public):
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    source, env = published(public, tiny, fake)
    path = success(run(worker_command(source), env))
    for folder in (public / "cache").rglob("*"):
        os.chown(folder, 12345, 12345)
        folder.chmod(0o755)
    (public / "cache").chmod(0o777)
    done = run(as_ordinary_user(worker_command(source)), env)
    text = failure(done)
    assert (
        "belongs to user 12345, not to this user (65534). Fix: use a cache directory" in done.stderr
    )
    assert text.startswith("precast.errors.CacheDirectoryError: ")
    assert ctypes.CDLL(str(path)).tiny_product() == 42


# -- full -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["4k", "8k", "16k", "24k", "32k", "64k", "96k", "128k"])
def test_a_full_disk_at_any_moment(tiny, cache, fake, mounts, size):
    # The fake compilers write 3 x 40 KB: each size fills up at another step.
    report = worker_command(tiny)
    listing = f"find {cache} -name '*.so' -o -name meta.json -o -path '*/.work/*'"
    cache.mkdir()
    setup = f"mount -t tmpfs -o size={size} none {cache}"
    shell = ["sh", "-c", f'"$@"; code=$?; echo left: $({listing}); exit $code', "sh", *report]
    done = run(in_namespace(setup, shell), fake)
    assert done.stdout.splitlines()[-1].strip() == "left:"
    text = failure(done)
    assert text.startswith(("precast.errors.CompileError", "precast.errors.CacheDirectoryError"))
    assert "the disk is full. Fix: free some space" in text or "No space left on device" in text


def test_a_disk_that_the_real_compilers_fill(tiny, cache, real, mounts):
    cache.mkdir()
    setup = f"mount -t tmpfs -o size=300k none {cache}"
    shell = [
        "sh",
        "-c",
        f'"$@"; code=$?; echo left: $(find {cache} -type f -size +0); exit $code',
        "sh",
    ]
    done = run(in_namespace(setup, [*shell, *worker_command(tiny)]), real)
    text = failure(done)
    assert "Cause: the disk is full. Fix: free some space, or point PRECAST_CACHE_DIR" in text
    assert ".so" not in done.stdout


# -- not sound ------------------------------------------------------------------------------------


def truncate(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def corrupt(library: Path) -> None:
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 0xFF
    library.write_bytes(data)


def foreign_library(library: Path) -> None:
    library.write_bytes(Path(sys.executable).resolve().read_bytes()[:100_000])


def foreign_pair(library: Path) -> None:
    """Another module's library with a meta.json that belongs to it."""
    library.write_bytes(b"another module")
    path = library.parent / "meta.json"
    meta = json.loads(path.read_text())
    digest = hashlib.sha256(b"another module").hexdigest()
    path.write_text(json.dumps({**meta, "fingerprint": "0" * 64, "size": 14, "sha256": digest}))


def no_meta(library: Path) -> None:
    (library.parent / "meta.json").unlink()


def half_meta(library: Path) -> None:
    truncate(library.parent / "meta.json")


def no_library(library: Path) -> None:
    library.unlink()


def world_writable(library: Path) -> None:
    library.chmod(0o777)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "truncated"),
        (corrupt, "was changed after it was built (sha256 differs)"),
        (foreign_library, "instead of"),
        (foreign_pair, "built from other sources or flags (its fingerprint differs)"),
        (no_meta, "meta.json cannot be read"),
        (half_meta, "meta.json cannot be read"),
        (no_library, "tiny.so cannot be read (No such file or directory)"),
        (world_writable, "is world-writable"),
    ],
)
def test_a_damaged_build_is_reported_and_replaced(tiny, cache, fake, damage, words):
    library = success(run(worker_command(tiny), fake))
    damage(library)
    done = run(worker_command(tiny), fake)
    assert (success(done), compiles(done)) == (library, 1)
    assert f"INFO: cached build {library.parent} is not used: " in done.stderr
    assert words in done.stderr
    assert ctypes.CDLL(str(library)).tiny_product() == 42
    third = run(worker_command(tiny), fake)
    assert (success(third), compiles(third)) == (library, 0)
    assert list((cache / "v1" / ".work").iterdir()) == []


def test_a_damaged_build_is_never_loaded_where_compiling_is_forbidden(tiny, fake):
    library = success(run(worker_command(tiny), fake))
    corrupt(library)
    done = run(worker_command(tiny), {**fake, "PRECAST_JIT": "error"})
    assert failure(done).startswith(
        "precast.errors.MissingJITCacheError: tiny for sm90a would have to be compiled, which is "
        "forbidden (PRECAST_JIT=error)"
    )
    assert "sha256 differs" in done.stderr
