# SPDX-License-Identifier: Apache-2.0
"""Compile one module into the user's cache.

Correctness never depends on a lock: each process compiles in a private folder on the cache's file
system and publishes the result by one rename. The lock only avoids duplicate work, and a process
waits for it for a bounded time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from precast._base import env as _env
from precast._base.errors import CacheDirectoryError, CompileError, MissingJITCacheError
from precast._base.log import get_logger
from precast._base.trust import own_folder
from precast._jit import cache, causes, cute_dsl, env, policy
from precast._jit.commands import Command, build_commands
from precast._jit.dependencies import dependencies
from precast._jit.hermetic import compiler_environment
from precast._jit.jobs import max_jobs
from precast._jit.owner import holder, sign
from precast._jit.ptxas_gate import GATE
from precast._jit.shell_names import PlainNames
from precast._jit.toolchain import find_toolchain
from precast._plan.install_hint import modules_command

if TYPE_CHECKING:
    from precast._jit.toolchain import Toolchain
    from precast._plan.spec import ModuleSpec

#: Interval of the lines in the log while a compile runs, or while a process waits for one.
HEARTBEAT_SECONDS = 15.0


def build(spec: ModuleSpec, reason: str) -> Path:
    """Return the library of ``spec``, compiled now unless the cache has it.

    Parameters
    ----------
    reason : str
        Why no prebuilt module is used. The log has it before anything is compiled.
    """
    found = cache.find(spec)
    if found.path is not None:
        return found.path
    for folder, problem in found.refused:
        get_logger().info("cached build %s is not used: %s", folder, problem)
    refusal = policy.refusal()
    if refusal is not None:
        raise MissingJITCacheError(
            f"{spec.name} for {spec.arch.name} would have to be compiled, which is forbidden "
            f"({refusal}). {reason}",
            spec,
        )
    toolchain = find_toolchain(spec.arch, spec.cuda_major, spec.tvm_ffi_range)
    cute_dsl.require(spec)
    root = env.writable_cache_dir()
    target = cache.entry(root, spec, toolchain)
    with _lock(root, target.name):
        if cache.check(target, spec) is None:  # Another process was faster.
            return target / f"{spec.name}.so"
        _announce(spec, toolchain, target, reason)
        return _compile(spec, toolchain, root, target)


def _announce(spec: ModuleSpec, toolchain: Toolchain, target: Path, reason: str) -> None:
    log = get_logger()
    say = log.warning if _env.JIT() == "warn" else log.info
    hint = f" Prebuilt: {modules_command({(spec.cuda_major, spec.arch.name): spec.arch.target})}."
    say(
        "compiling %s for %s with nvcc %s into %s. Why: %s.%s",
        spec.name,
        spec.arch.name,
        toolchain.toolkit.build,
        target,
        reason,
        hint if spec.is_aot else "",
    )


def _compile(spec: ModuleSpec, toolchain: Toolchain, root: Path, target: Path) -> Path:
    start = time.monotonic()
    work = None
    try:
        work = cache.work_folder(root, spec)
        with PlainNames() as names:
            named = names.spec(spec), names.toolchain(toolchain)
            *compiles, link = build_commands(*named, work)
            run(compiles, work, spec.name)
            run([link], work, spec.name)
            seen = dependencies(spec, toolchain, work, names.wrappers.values())
        took = time.monotonic() - start
        meta = cache.write_meta(spec, toolchain, link.output, took, seen)
        path = cache.publish(work, target, spec, meta)
    except OSError as error:
        known = causes.os_cause(error, root)
        raise CacheDirectoryError(
            f"{spec.name} could not be stored in {root}: {error.strerror or error}. Nothing was "
            f"left there." + (f"\nCause: {known}" if known else "")
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    get_logger().info("compiled %s in %.1f s", spec.name, time.monotonic() - start)
    return path


class _Running(NamedTuple):
    """A compiler that has been started."""

    command: Command
    process: subprocess.Popen[bytes]
    log: BinaryIO
    #: Held open for as long as this process lives and waits for it.
    life_line: BinaryIO


def run(commands: list[Command], work: Path, name: str) -> None:
    """Run commands in parallel, as many as cores and memory allow.

    Raises
    ------
    CompileError
        If one fails. The message has the command, its first errors and the known cause.
    """
    limit = max_jobs()
    waiting = list(commands)
    running: list[_Running] = []
    start = beat = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                running.append(_start(waiting.pop(0), work))
            for one in list(running):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = one.process.wait(timeout=0.02)
                    running.remove(one)
                    with one.log, one.life_line:
                        if status != 0:
                            raise _failure(one.command, status, one.log, work, name)
            if time.monotonic() - beat > HEARTBEAT_SECONDS:
                beat = time.monotonic()
                get_logger().info("still compiling %s after %.0f s", name, beat - start)
    finally:
        for one in running:
            # The whole process group: the compilers are children of nvcc and g++.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
            one.log.close()
            one.life_line.close()


#: Runs a command in the group of a process that ends the group when the other end of its standard
#: input is closed, which the system does when this process ends, however it ends.
_GUARDED = f"""{GATE}
exec 3<&0 </dev/null
{{ read -r line <&3; kill -KILL 0; }} &
guard=$!
gate "$@" 3<&-
status=$?
kill -KILL $guard
exit $status
"""


def _start(command: Command, work: Path) -> _Running:
    """Start a compiler; its output is kept in memory, because the disk may be full."""
    try:
        if not os.access(command.argv[0], os.X_OK):
            number = errno.EACCES if Path(command.argv[0]).exists() else errno.ENOENT
            raise OSError(number, os.strerror(number))
    except OSError as error:
        raise _not_started(command, error) from error
    log = os.fdopen(os.memfd_create(command.output.name), "w+b")
    # nvcc keeps its intermediate files in ``work``, so that a kill leaves nothing elsewhere; the
    # name is relative, because nvcc gives it to a shell.
    environment = compiler_environment(TMPDIR=".")
    read_end, write_end = os.pipe()
    life_line = os.fdopen(write_end, "wb")
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDED, "sh", *command.argv],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=read_end,
            cwd=work,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        log.close()
        life_line.close()
        raise _not_started(command, error) from error
    finally:
        os.close(read_end)
    return _Running(command, process, log, life_line)


def _not_started(command: Command, error: OSError) -> CompileError:
    return CompileError(
        f"{command.argv[0]} cannot be started ({error.strerror}). Fix: reinstall the compiler "
        f"(see: precast doctor)"
    )


def _failure(
    command: Command, returncode: int, log: BinaryIO, work: Path, name: str
) -> CompileError:
    log.seek(0)
    output = log.read().decode(errors="replace")
    known = causes.cause(output, returncode, work)
    return CompileError(
        f"compiling {name} failed (exit status {returncode}):\n"
        f"  {shlex.join(command.argv)}\n"
        f"{causes.first_errors(output)}" + (f"\nCause: {known}" if known else "")
    )


@contextlib.contextmanager
def _lock(root: Path, name: str) -> Iterator[None]:
    """Hold the lock of a module, after a bounded wait for another process that compiles it."""
    import filelock

    folder = root / cache.LOCK_FOLDER
    owner = folder / f"{name}.owner"
    lock = None
    try:
        own_folder(folder)
        lock = filelock.FileLock(
            folder / f"{name}.lock", preserve_lock_file=True, fallback_to_soft=False
        )
        _acquire(lock, name, owner)
    except (OSError, NotImplementedError) as error:
        # Without the lock, two processes may compile the same module; both builds are valid.
        # A filelock.Timeout is an OSError, too; _acquire has logged which process it waited for.
        get_logger().info("no lock for %s (%s): this process compiles for itself", name, error)
    else:
        sign(owner)
    try:
        yield
    finally:
        if lock is not None and lock.is_locked:
            with contextlib.suppress(OSError):
                lock.release()


def _acquire(lock: object, name: str, owner: Path) -> None:
    import filelock

    assert isinstance(lock, filelock.BaseFileLock)
    start = time.monotonic()
    limit = _env.LOCK_TIMEOUT()
    patience = 0.0  # The first attempt does not wait, so that the log names the holder at once.
    while True:
        try:
            lock.acquire(timeout=patience)
            return
        except filelock.Timeout:
            waited = time.monotonic() - start
            get_logger().info(
                "waiting for %s, which compiles %s: %.0f s of at most %.0f s",
                *(holder(owner), name, waited, limit),
            )
            patience = min(HEARTBEAT_SECONDS, limit - waited)
            if patience <= 0:
                raise
