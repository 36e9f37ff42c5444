# SPDX-License-Identifier: Apache-2.0
"""The protocol of a compile, with shell commands in the place of compilers."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from compiler_support import TOOLCHAIN, ShellSpec, left_over, links
from hostile_environment import hostile_environment
from loader_support import messages

import precast
from precast._jit import cache, compiler, env
from precast._jit.commands import Command
from precast._jit.hermetic import FIXED_VARIABLES, PASSED_VARIABLES, launcher
from precast._jit.ptxas_gate import _SLOW, OPTION
from precast._jit.toolchain import Toolkit
from precast._plan.install_hint import modules_command
from precast._plan.planner import Plan
from precast.errors import CacheDirectoryError, CompileError, MissingJITCacheError, ToolchainError


def test_a_build_is_announced_then_published_whole_then_found(make, tmp_path, caplog):
    spec = make()
    path = spec.build("no provider is installed")
    assert path.read_text() == "library\n"
    assert path == spec.get_library_path()
    assert spec.build() == path
    assert links(tmp_path) == 1
    (entry,) = cache.contents().builds
    assert entry.meta is not None
    assert (entry.meta.fingerprint, entry.meta.compiler) == (
        spec.fingerprint,
        "nvcc 13.0.88; g++ 12",
    )
    assert {p.name for p in path.parent.iterdir()} == {path.name, "meta.json"}
    assert left_over(env.cache_dir()) == []
    assert oct(env.cache_dir().stat().st_mode & 0o777) == "0o700"
    before, after = messages(caplog, logging.INFO)
    assert before == (
        f"compiling scale__dtype_f32 for sm90a with nvcc 13.0.88 into {path.parent}. Why: no "
        f"provider is installed. Prebuilt: {modules_command({(13, 'sm90a'): '9.0a'})}."
    )
    assert after.startswith("compiled scale__dtype_f32 in 0.")
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]


def test_the_line_before_a_compile_comes_before_it(make, tmp_path, caplog):
    seen = tmp_path / "seen"
    spec = make(compile_line=f'sleep 0.2; cat {seen} > /dev/null && echo x > "$1"')
    handler = logging.Handler()
    handler.emit = lambda record: seen.touch()  # type: ignore[method-assign]
    logging.getLogger("precast").addHandler(handler)
    try:
        # The command reads the file that the line makes: it fails if the line comes later.
        assert spec.build("why").is_file()
    finally:
        logging.getLogger("precast").removeHandler(handler)
    assert seen.is_file()


def test_policy_warn_warns_and_error_forbids(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PRECAST_JIT", "error")
    text = r"would have to be compiled, which is forbidden \(PRECAST_JIT=error\). why"
    with pytest.raises(MissingJITCacheError, match=text) as caught:
        make().build("why")
    assert caught.value.spec == make()
    assert not env.cache_dir().exists()
    monkeypatch.setenv("PRECAST_JIT", "warn")
    path = make().build("why")
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    precast.freeze()
    assert make().build("why") == path


def test_heartbeats_while_compiling(make, monkeypatch, caplog):
    monkeypatch.setattr(compiler, "HEARTBEAT_SECONDS", 0.2)
    make(compile_line='sleep 0.7; echo > "$1"').build()
    beats = [m for m in messages(caplog, logging.INFO) if m.startswith("still compiling scale")]
    assert 2 <= len(beats) <= 4


def test_a_second_thread_waits_for_the_build_and_logs_it(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compiler, "HEARTBEAT_SECONDS", 0.2)
    spec = make(compile_line='sleep 0.6; echo > "$1"')
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(spec.build())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert links(tmp_path) == 1
    lines = messages(caplog, logging.INFO)
    assert sum(m.startswith("compiling ") for m in lines) == 1
    owner = f"process {os.getpid()} on {os.uname().nodename}"
    waits = [
        m for m in lines if m.startswith(f"waiting for {owner}, which compiles scale__dtype_f32-")
    ]
    assert len(waits) >= 4


def test_a_lock_that_is_held_too_long_is_not_waited_for(make, tmp_path, monkeypatch, caplog):
    import filelock

    monkeypatch.setenv("PRECAST_LOCK_TIMEOUT", "0.3")
    spec = make()
    folder = env.writable_cache_dir() / cache.LOCK_FOLDER
    folder.mkdir()
    name = cache.entry(env.cache_dir(), spec, TOOLCHAIN).name
    with filelock.FileLock(folder / f"{name}.lock"):
        start = time.monotonic()
        path = spec.build()
        assert 0.3 <= time.monotonic() - start < 5
    assert path.is_file()
    lines = messages(caplog, logging.INFO)
    assert any("0 s of at most 0 s" in m and "another process" in m for m in lines)
    assert any("this process compiles for itself" in m for m in lines)


@pytest.mark.parametrize("number", ["ENOSYS", "ENOLCK", "ESTALE", "EOPNOTSUPP"])
def test_without_flock_each_compiles_for_itself(make, tmp_path, monkeypatch, caplog, number):
    import errno
    import fcntl

    def no_flock(fd, operation):
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    assert make().build().is_file()
    assert any("this process compiles for itself" in m for m in messages(caplog, logging.INFO))


def test_a_dead_owner_leaves_a_name_and_no_lock(make, caplog):
    spec = make()
    folder = env.writable_cache_dir() / cache.LOCK_FOLDER
    folder.mkdir()
    name = cache.entry(env.cache_dir(), spec, TOOLCHAIN).name
    (folder / f"{name}.owner").write_text("process 1 on a machine that is gone")
    (folder / f"{name}.lock").touch()
    assert spec.build().is_file()
    assert not any("waiting" in m for m in messages(caplog, logging.INFO))


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("echo 'k.cu(3): error: x is undefined' >&2; exit 2", ["k.cu(3): error: x is undefined"]),
        ("for i in $(seq 99); do echo line $i; done; exit 1", ["    line 88\n", "    line 99"]),
        ("echo 'k.cu:2: #error PRECAST_DTYPE'; exit 1", ["Cause: the kernel refuses this"]),
        (
            "echo 'nvcc fatal : Unsupported gpu architecture'; exit 1",
            ["Cause: this nvcc is too old"],
        ),
        (
            "echo 'fatal error: cuda_fp16.h: No such file'; exit 1",
            ["Cause: CUDA headers are missing"],
        ),
        (
            "echo 'fatal error: tvm/ffi/any.h: No such file'; exit 1",
            ["Cause: the headers of tvm-ffi"],
        ),
        (
            "echo 'No space left on device'; exit 1",
            ["Cause: the disk is full", "PRECAST_CACHE_DIR"],
        ),
        (
            "echo 'error: unsupported GNU version!'; exit 1",
            ["Cause: this nvcc does not support so new a host"],
        ),
        ("kill -9 $$", ["exit status 137", "Cause: the compiler ran out of memory", "MAX_JOBS"]),
        ("exit 137", ["exit status 137", "Cause: the compiler ran out of memory"]),
    ],
)
def test_a_failure_shows_command_first_errors_and_cause(make, line, words):
    with pytest.raises(CompileError) as caught:
        make(compile_line=line).build()
    text = str(caught.value)
    assert text.startswith("compiling scale__dtype_f32 failed (exit status ")
    assert "\n  /bin/sh -c " in text
    for word in words:
        assert word in text
    assert cache.contents().builds == []
    assert left_over(env.cache_dir()) == []
    assert make().build().is_file()


NOTE = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are"
SPILL = "ptxas error   : Registers are spilled to local memory in function k, 8 bytes"


@pytest.mark.parametrize(
    ("printed", "status", "words"),
    [
        (NOTE, 0, "ptxas serialises or delays wgmma, or ignores setmaxnreg"),
        (NOTE.replace("C7510", "C7504"), 0, "ptxas serialises or delays wgmma"),
        (SPILL, 255, "a kernel needs local memory. Fix: keep fewer values at once"),
        (f"{NOTE}\n{SPILL}", 255, "ptxas serialises or delays wgmma"),
    ],
)
def test_where_warnings_are_errors_a_note_of_ptxas_fails_too(
    make, tmp_path, printed, status, words
):
    line = f"echo '{printed}' >&2; echo object > \"$1\"; exit {status}"
    with pytest.raises(CompileError) as caught:
        make(compile_line=f": -Xptxas=--warn-on-spills,{OPTION}; {line}").build()
    text = str(caught.value)
    assert text.startswith("compiling scale__dtype_f32 failed (exit status 1):\n  /bin/sh -c ")
    assert f"error: {tmp_path}/count: {words}" in text
    assert "Fix: " in text
    assert 'See "Kernels for Hopper" in CONTRIBUTING.md' in text
    for said in printed.splitlines():
        assert f"\n    {said}" in text
    assert cache.contents().builds == []


@pytest.mark.parametrize("printed", [NOTE, "a warning of another kind"])
def test_elsewhere_a_note_of_ptxas_is_one(make, printed):
    option = "" if printed == NOTE else f": {OPTION}; "
    assert make(compile_line=f"{option}echo '{printed}'; echo object > \"$1\"").build().is_file()


def test_the_launcher_of_build_systems_fails_for_notes_as_jit_does(tmp_path):
    script = tmp_path / "launcher.sh"
    script.write_text(launcher())

    def launched(*words: str) -> tuple[int, str]:
        argv = ["sh", str(script), "sh", "-c", *words]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout

    option, out = f"-Xptxas={OPTION}", "CMakeFiles/sm90a-op__dtype_f32.dir/op.cu.o"
    assert launched(f"echo '{NOTE}'", "sh", option, "-o", out) == (
        1,
        f'error: {out}: {_SLOW}. See "Kernels for Hopper" in CONTRIBUTING.md\n{NOTE}\n',
    )
    assert launched(f"echo '{NOTE}'", "sh", "-o", out) == (0, f"{NOTE}\n")
    assert launched("echo 'a  warning'", "sh", option, "-o", out) == (0, "a  warning\n")
    assert launched("echo failed; exit 3", "sh", option, "-o", out) == (3, "failed\n")
    assert launched("exit 3", "sh", "-o", out) == (3, "")
    assert launched("true", "sh", option, "-o", out) == (0, "")


def test_a_failure_ends_the_other_compilers_and_their_children(make, tmp_path):
    mark = tmp_path / "mark"
    line = f'case "$1" in *a.o) sleep 0.3; exit 1;; esac; (sleep 1; touch {mark}); :'
    with pytest.raises(CompileError):
        make(compile_line=line).build()
    time.sleep(1.2)
    assert not mark.exists()


def test_a_compiler_that_cannot_be_started(make):
    class NoCompiler(ShellSpec):
        def commands(self, toolchain, folder):
            return [Command("cuda", ["/no/such/nvcc"], folder / "a.o")] * 2

    fields = {f.name: getattr(make(), f.name) for f in dataclasses.fields(ShellSpec)}
    text = r"/no/such/nvcc cannot be started \(No such file or directory\). Fix: reinstall"
    with pytest.raises(CompileError, match=text):
        NoCompiler(**fields).build()
    assert left_over(env.cache_dir()) == []


def test_a_linker_that_makes_nothing_is_an_error_and_nothing_is_published(make):
    with pytest.raises(CacheDirectoryError, match="could not be stored in"):
        make(link_line="true").build()
    assert cache.contents().builds == []
    assert left_over(env.cache_dir()) == []


def test_a_tvm_ffi_outside_the_range_is_rejected_before_compiling(tree, monkeypatch):
    from precast._base import tvm_ffi as _tvm_ffi
    from precast.jit import JitSpec

    spec = JitSpec.of(Plan.load(tree).spec("scale", {"dtype": "f32"}, "9.0"))
    toolkit = Toolkit("test", Path("nvcc"), (13, 0), "13.0.88", Path(), Path())
    monkeypatch.setattr("precast._jit.toolchain.find_toolkit", lambda *args: toolkit)
    monkeypatch.setattr("precast._jit.toolchain.host_compiler", lambda: (Path("g++"), "g++ 12"))
    monkeypatch.setattr(_tvm_ffi, "version", lambda: "0.9")
    with pytest.raises(
        ToolchainError, match=r"precast needs apache-tvm-ffi in \[[0-9., ]+\), installed"
    ):
        spec.build()


def test_compilers_get_only_the_variables_that_are_listed(make, tmp_path, monkeypatch):
    for name in (*hostile_environment(tmp_path), "LD_PRELOAD_OF_ANOTHER", "LANG"):
        monkeypatch.setenv(name, "-DX")
    seen = tmp_path / "seen"
    line = f'env > {seen}-$(basename "$1"); echo > "$1"'
    make(compile_line=line, link_line=line).build()
    records = [path.read_text() for path in tmp_path.glob("seen-*")]
    assert len(records) == 3
    of_the_shell = {"PWD", "OLDPWD", "SHLVL", "_"}
    for text in records:
        names = {row.partition("=")[0] for row in text.splitlines()}
        assert names - of_the_shell <= {*PASSED_VARIABLES, *FIXED_VARIABLES}
        assert {"PATH", "TMPDIR", "LC_ALL"} <= names
