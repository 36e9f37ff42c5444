# SPDX-License-Identifier: Apache-2.0
"""Places that cannot be read, or should not be: ``import precast`` survives them and names them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from loader_support import BF16, rejections, resolve

from precast._base import trust
from precast._jit import env
from precast._runtime import jit_spec, library, loader, providers
from precast._runtime.jit_spec import JitSpec
from precast.errors import LoadError, MissingKernelError

ROOT = Path(__file__).resolve().parents[3]
FILE = "sm90a/norm__dtype_bf16.so"


def imported(script: str = "", cwd: Path | None = None, **variables: str) -> str:
    """The output of a process that imports precast and lists the problems of its providers."""
    listing = (
        "from precast._runtime.loader import loader\n"
        "for provider in loader.providers: print(provider.root, provider.problem)"
    )
    code = f"{script}\nimport precast\n{listing}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PRECAST_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT / "python"), **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("variable", ["PRECAST_KERNEL_DIR", "PRECAST_PROVIDER_PATH"])
@pytest.mark.parametrize(
    ("place", "problem"),
    [("/" + "a" * 5000, "File name too long"), ("/proc/1/no\\such", "No such file or directory")],
)
def test_a_path_that_the_system_refuses_is_a_provider_with_a_problem(variable, place, problem):
    assert f"manifest.json cannot be read ({problem})" in imported(**{variable: place})


def test_a_folder_that_cannot_be_listed(world, monkeypatch, tmp_path):
    def stale(self, pattern):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "glob", stale)
    world.patch.setenv("PRECAST_PROVIDER_PATH", str(tmp_path / "mount"))
    (provider,) = providers.find_providers()
    assert "mount/manifest.json cannot be read" in str(provider.problem)


@pytest.mark.parametrize("variables", [{}, {"PRECAST_PROVIDER_PATH": "relative"}])
def test_a_working_directory_that_was_deleted(variables, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    imported("import os; os.rmdir(os.getcwd())", cwd=gone, **variables)


def test_a_manifest_that_is_nested_too_deeply(world):
    root = world.provide("p", "9.0")
    (root / "manifest.json").write_text("[" * 100_000)
    world.loader()
    assert "manifest.json is damaged" in rejections(resolve())[0]


@pytest.mark.parametrize("name", ["manifest.json", FILE])
def test_a_pipe_is_no_file_to_wait_for(world, name):
    root = world.provide("p", "9.0")
    (root / name).unlink()
    os.mkfifo(root / name, 0o644)
    world.loader()
    assert "cannot be read (not a regular file)" in rejections(resolve())[0]


@pytest.mark.parametrize("content", [b"[a]\nno equals sign\n", b"[a]\nb = \xff\xfe:c\n"])
def test_damaged_entry_points_of_another_distribution(tmp_path, content):
    for name, text in (
        ("broken", content),
        ("good", b"[precast.jit_cache]\nmine = good_package\n"),
    ):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_bytes(text)
    found = imported(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    assert f"{tmp_path}/good_package" in found


# -- a user without a home -----------------------------------------------------------------------


def test_a_user_without_a_home_reads_no_cache_and_writes_a_private_one(monkeypatch, caplog):
    def nobody(*args, **kwargs):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("platformdirs.user_cache_dir", nobody)
    monkeypatch.setattr(env, "_temporary", {})
    env._default_cache_dir.cache_clear()
    monkeypatch.delenv("PRECAST_CACHE_DIR")
    try:
        assert not env.cache_dir().exists()
        path = env.writable_cache_dir()
        assert path.is_dir()
        assert path.stat().st_mode & 0o777 == 0o700
        assert "cannot be written; modules compiled by this process go to" in caplog.text
        env._remove_own(env._temporary[os.getpid()], os.getpid())
    finally:
        env._default_cache_dir.cache_clear()


# -- files that are exchanged, and forks ----------------------------------------------------------


def test_a_file_that_is_exchanged_between_its_check_and_its_load_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "m.so"
    path.write_bytes(b"checked")

    class Ffi:
        def load_module(self, name: str) -> str:
            other = tmp_path / "other"
            other.write_bytes(b"another")
            other.rename(name)
            return "module"

    monkeypatch.setattr(library, "_import_tvm_ffi", Ffi)
    monkeypatch.setattr(library, "open_cudart", lambda *args: None)
    assert "differs" in str(trust.check_contents(path, 7, "0" * 64, "again"))
    with pytest.raises(LoadError, match="was exchanged while it was loaded"):
        library.load_library(path, 13)


def test_a_file_that_was_exchanged_since_its_check_is_never_opened(tmp_path, monkeypatch):
    path = tmp_path / "m.so"
    path.write_bytes(b"checked")

    def import_tvm_ffi() -> SimpleNamespace:
        (tmp_path / "other").write_bytes(b"another")
        (tmp_path / "other").rename(path)
        return SimpleNamespace(load_module=lambda name: pytest.fail("it was opened"))

    monkeypatch.setattr(library, "_import_tvm_ffi", import_tvm_ffi)
    monkeypatch.setattr(library, "open_cudart", lambda *args: None)
    trust.check_contents(path, 7, "0" * 64, "again")
    with pytest.raises(LoadError, match="was exchanged while it was loaded"):
        library.load_library(path, 13)


@pytest.mark.parametrize("how", ["load", "build_and_load"])
def test_tvm_ffi_is_imported_before_a_build_is_checked(world, monkeypatch, how):
    spec = JitSpec.of(world.spec())
    path = world.cached(spec)
    order = []
    monkeypatch.setattr(jit_spec, "import_ffi", lambda: order.append("import"))
    monkeypatch.setattr(jit_spec.cache, "check", lambda *args: order.append("check"))
    monkeypatch.setattr(JitSpec, "_open", lambda self, path: path)
    assert getattr(spec, how)() == path
    assert order == ["import", "check"]


def test_tvm_ffi_is_imported_before_contents_are_checked(world, monkeypatch):
    world.provide("p", "9.0")
    world.loader()
    order = []
    monkeypatch.setattr(library, "import_ffi", lambda: order.append("import"))
    check = trust.check_contents
    monkeypatch.setattr(
        trust, "check_contents", lambda *args: order.append("check") or check(*args)
    )
    loader.loader.load("norm", BF16, 0)
    assert order == ["import", "check"]


def test_a_child_that_is_forked_while_another_thread_loads_can_load(world):
    world.provide("p", "9.0")
    world.loader()
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with loader.loader._lock:
            holding.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(10)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            loader.loader.load("norm", BF16, 0)
            status = 0
        except MissingKernelError:
            status = 2
        finally:
            os._exit(status)
    try:
        for _ in range(400):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            threading.Event().wait(0.05)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child waits for a lock that nobody holds")
    finally:
        release.set()
        thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
