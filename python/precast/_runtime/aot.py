# SPDX-License-Identifier: Apache-2.0
"""Build many modules into a folder, by the commands that JIT uses.

A run that was stopped continues where it stopped: a module is kept if its fingerprint, its compiler
and its contents are still the planned ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from precast._base.errors import ProviderError, ToolchainError
from precast._base.files import read_regular
from precast._base.log import get_logger
from precast._base.progress import Progress, make_progress
from precast._jit import cache, compiler, cute_dsl
from precast._jit.commands import Command, build_commands
from precast._jit.jobs import max_jobs
from precast._jit.owner import holder, sign
from precast._jit.shell_names import PlainNames
from precast._jit.toolchain import Toolchain, find_toolchain
from precast._plan.planner import Plan
from precast._plan.spec import ModuleSpec
from precast._runtime import elf
from precast._runtime.manifest import MANIFEST_NAME, Manifest
from precast._runtime.manifest_writer import unplanned, write_manifest

#: Holds a record of each finished module, by which the next run decides what to keep.
STATE_FOLDER = ".build"
_WORK_PREFIX = ".work-"
#: What is built may be for others to read, and a library that others can write is never loaded.
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755
DISTRIBUTION = "precast.aot"


def build(
    plan: Plan,
    specs: Sequence[ModuleSpec],
    out_dir: Path,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Build modules into a folder and write its manifest.

    Parameters
    ----------
    specs : sequence of ModuleSpec
        The modules to build, all of one CUDA major. Where the compiler of CuTe DSL is not
        installed, those that need it are left out, and a warning in the log lists them.
    out_dir : Path
        The folder to which ``<arch>/<module>.so`` and ``manifest.json`` are written.
    jobs : int, optional
        The number of compilers at once. Default: from cores and free memory.

    Raises
    ------
    ToolchainError
        If there is no compiler for one of the targets, or every module is left out.
    CompileError
        If a command fails. Finished modules stay, and the next run continues from there.
    ProviderError
        If the folder holds modules that are not planned, or another process builds into it.
    """
    if not specs:
        raise ProviderError("nothing is planned: the profile or the targets are empty")
    elf.require_readers()  # Before the first compile, not after the last.
    toolchain = find_toolchain(
        max((spec.arch for spec in specs), key=lambda arch: arch.cuda), specs[0].cuda_major
    )
    kept, left_out = cute_dsl.buildable(specs)
    if not kept:
        raise ToolchainError(cute_dsl.statement(left_out))
    if left_out:
        get_logger().warning("%s", cute_dsl.statement(left_out))
    out_dir = out_dir.absolute()  # Compilers run in other folders.
    is_known = (out_dir / STATE_FOLDER).is_dir()
    _make_folder(out_dir)
    with _only_builder(out_dir):
        if is_known:  # Elsewhere such a folder is not of a build that was killed.
            for left in out_dir.glob(f"{_WORK_PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
        return _build(plan, kept, toolchain, out_dir, jobs, progress)


def _build(
    plan: Plan,
    specs: Sequence[ModuleSpec],
    toolchain: Toolchain,
    out_dir: Path,
    jobs: int | None,
    progress: Progress | None,
) -> Manifest:
    unexpected = unplanned(out_dir, (spec.file_name for spec in specs))
    if unexpected:
        raise ProviderError(
            "\n".join([f"{out_dir} holds other modules. Fix: use an empty folder", *unexpected])
        )
    (out_dir / MANIFEST_NAME).unlink(missing_ok=True)
    todo = [spec for spec in specs if not is_built(spec, toolchain, out_dir)]
    progress = progress or make_progress(len(specs))
    with progress:
        progress.skip(len(specs) - len(todo))
        work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=out_dir))
        try:
            _Builder(toolchain, out_dir, work).run(todo, jobs or max_jobs(), progress)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    manifest = write_manifest(
        out_dir,
        plan,
        specs,
        distribution=DISTRIBUTION,
        toolkit=toolchain.toolkit.build,
    )
    (out_dir / MANIFEST_NAME).chmod(_FILE_MODE)
    return manifest


@contextlib.contextmanager
def _only_builder(out_dir: Path) -> Iterator[None]:
    """Hold the lock of a folder; raise if another process has it."""
    import filelock

    state = out_dir / STATE_FOLDER
    _make_folder(state)
    owner = state / "owner"
    lock = filelock.FileLock(state / "lock", timeout=0, preserve_lock_file=True)
    try:
        with lock:
            sign(owner)
            yield
    except filelock.Timeout:
        raise ProviderError(
            f"{holder(owner)} builds into {out_dir}. Fix: wait for it, or use another folder"
        ) from None


def _make_folder(path: Path) -> None:
    """Make a folder that others can read and only this user can write, whatever the umask is."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(_FOLDER_MODE)


def is_built(spec: ModuleSpec, toolchain: Toolchain, out_dir: Path) -> bool:
    """Whether ``out_dir`` holds a build of this module by this compiler from these sources."""
    try:
        record = _record(spec, out_dir)
        data = read_regular(out_dir / spec.file_name)[0]
    except (OSError, ValueError, TypeError):
        return False
    return (
        record.fingerprint == spec.fingerprint
        and record.compiler == toolchain.identity
        and record.sha256 == hashlib.sha256(data).hexdigest()
    )


def compile_seconds(specs: Iterable[ModuleSpec], out_dir: Path) -> dict[str, float]:
    """The build time of each module, by the name of its file."""
    return {spec.file_name: _record(spec, out_dir).compile_seconds for spec in specs}


def _record(spec: ModuleSpec, out_dir: Path) -> cache.Meta:
    return cache.Meta.read(_record_path(spec, out_dir))


def _record_path(spec: ModuleSpec, out_dir: Path) -> Path:
    return out_dir / STATE_FOLDER / spec.arch.name / f"{spec.name}.json"


class _Builder:
    """Runs the commands of many modules; an object that several modules link is compiled once."""

    def __init__(self, toolchain: Toolchain, out_dir: Path, work: Path) -> None:
        self.toolchain, self.out_dir, self.work = toolchain, out_dir, work
        self.names = PlainNames()
        self.shared: dict[tuple[str, ...], tuple[Path, Future[None]]] = {}
        self.stop = threading.Event()

    def run(self, specs: Sequence[ModuleSpec], jobs: int, progress: Progress) -> None:
        with self.names, ThreadPoolExecutor(jobs) as pool:
            # Shared objects are submitted first, so that a module never waits for one still queued.
            plans = [(spec, self._prepare(spec, pool)) for spec in specs]
            running = {
                pool.submit(self._module, spec, commands, progress): spec
                for spec, commands in plans
            }
            try:
                for done in as_completed(running):
                    progress.done(running[done].file_name, done.result())
            except BaseException:
                self.stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _prepare(self, spec: ModuleSpec, pool: ThreadPoolExecutor) -> list[Command]:
        """The commands of a module, with its host objects replaced by shared ones."""
        folder = self.work / spec.arch.name / spec.name
        folder.mkdir(parents=True)
        commands, moved = [], {}
        named = self.names.spec(spec), self.names.toolchain(self.toolchain)
        for command in build_commands(*named, folder):
            if command.kind == "host":
                key = tuple(a for a in command.argv if a != str(command.output))
                if key not in self.shared:
                    output = self.work / f"{len(self.shared)}-{command.output.name}"
                    argv = [str(output) if a == str(command.output) else a for a in command.argv]
                    task = pool.submit(self._execute, Command("host", argv, output), spec.op)
                    self.shared[key] = output, task
                moved[str(command.output)] = str(self.shared[key][0])
            else:
                argv = [moved.get(word, word) for word in command.argv]
                commands.append(command._replace(argv=argv))
        return commands

    def _module(self, spec: ModuleSpec, commands: list[Command], progress: Progress) -> float:
        start = time.monotonic()
        progress.start(spec.file_name)
        *compiles, link = commands
        for command in compiles:
            self._execute(command, spec.file_name)
        took = time.monotonic() - start
        for output, task in self.shared.values():
            if str(output) in link.argv:
                task.result()
        start = time.monotonic()
        self._execute(link, spec.file_name)
        took += time.monotonic() - start
        self._publish(spec, link.output, took)
        return took

    def _execute(self, command: Command, name: str) -> None:
        if not self.stop.is_set():
            compiler.run([command], command.output.parent, name)

    def _publish(self, spec: ModuleSpec, library: Path, seconds: float) -> None:
        if self.stop.is_set():
            return
        record = _record_path(spec, self.out_dir)
        target = self.out_dir / spec.file_name
        for path in (record, target):
            _make_folder(path.parent)
        record.unlink(missing_ok=True)
        library.chmod(_FILE_MODE)  # The linker follows the umask.
        library.replace(target)
        meta = cache.write_meta(spec, self.toolchain, target, seconds)
        record.write_text(meta.dump(), encoding="utf-8")
