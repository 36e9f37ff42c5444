# SPDX-License-Identifier: Apache-2.0
"""The user's JIT cache: content-addressed folders that are written once and never changed.

``<cache>/v1/cu13-x86_64/sm90a/norm__dtype_bf16-<key>/`` holds the library and ``meta.json``. The
key covers the module's fingerprint and the compilers' versions. The path names the machine, because
hosts of two kinds may share a home directory. A complete folder appears by one rename.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast._base import tvm_ffi as _tvm_ffi
from precast._base.errors import ToolchainError
from precast._base.files import path_problem, read_regular
from precast._base.trust import check_contents, own_folder, trust_problem
from precast._jit import env, policy
from precast._jit.dependencies import sha256_of

if TYPE_CHECKING:
    from precast._jit.toolchain import Toolchain
    from precast._plan.spec import ModuleSpec

META_SCHEMA = 2
META_NAME = "meta.json"
#: Private folders of running compiles. An older one belongs to a process that has died.
WORK_FOLDER = ".work"
LOCK_FOLDER = ".locks"
STALE_SECONDS = 6 * 3600.0
#: Names in the cache: ``cu13-x86_64``, ``sm90a`` and ``norm__dtype_bf16-0123456789abcdef``.
_MAJOR_NAME = re.compile(r"cu\d+-\w+")
_ARCH_NAME = re.compile(r"sm\d+\w*")
_BUILD_NAME = re.compile(r"\w[\w.-]*-[0-9a-f]{16}")
#: The end of the name of a private folder: ``-<host>-<process>-<random>``.
_WORK_NAME = re.compile(r"-(?P<host>[\w.]+)-(?P<process>\d+)-\w+(-kept)?$")
#: Errors of a rename whose target exists.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@dataclass(frozen=True)
class Meta:
    """``meta.json``: the identity, size and digest of a cached library."""

    name: str
    arch: str
    cuda_major: int
    fingerprint: str
    compiler: str
    tvm_ffi: str
    size: int
    sha256: str
    compile_seconds: float
    #: sha256 by path of the files that only the compiler found, which the fingerprint lacks.
    dependencies: dict[str, str] = field(default_factory=dict)
    schema: int = META_SCHEMA

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> Meta:
        """Read ``path``; raise ValueError if it is not such a file."""
        try:
            data = json.loads(read_regular(path)[0])
        except RecursionError:
            raise ValueError("nested too deeply") from None
        fields = dataclasses.fields(cls)
        if not isinstance(data, dict) or set(data) != {f.name for f in fields}:
            raise ValueError("not a meta.json of this version")
        for f in fields:
            value = data[f.name]
            kind = {"int": int, "float": float, "dict[str, str]": dict}.get(str(f.type), str)
            if isinstance(value, dict) and not all(isinstance(v, str) for v in value.values()):
                raise ValueError(f"{f.name} is {value!r}")
            if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
                raise ValueError(f"{f.name} is {value!r}")
        if data["schema"] != META_SCHEMA:
            raise ValueError("not a meta.json of this version")
        return cls(**data)


@dataclass
class Found:
    """The result of a search: the path of a build, or why each candidate was refused."""

    path: Path | None = None
    refused: list[tuple[Path, str]] = field(default_factory=list)


def key(spec: ModuleSpec, toolchain: Toolchain) -> str:
    text = f"{spec.fingerprint}\n{toolchain.identity}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def module_folder(root: Path, spec: ModuleSpec) -> Path:
    return root / f"cu{spec.cuda_major}-{os.uname().machine}" / spec.arch.name


def entry(root: Path, spec: ModuleSpec, toolchain: Toolchain) -> Path:
    """The folder of the build of this spec by this toolchain, which need not exist yet."""
    return module_folder(root, spec) / f"{spec.name}-{key(spec, toolchain)}"


def find(spec: ModuleSpec) -> Found:
    """Search for a build of ``spec`` that may be loaded.

    If a compiler is available, only a build by this compiler is accepted, so that a new compiler
    takes effect. If there is none, or the policy forbids compiling, every build with the right
    fingerprint is accepted.
    """
    found = Found()
    folders = [
        folder
        for root in env.cache_dirs()
        for folder in sorted(module_folder(root, spec).glob(f"{spec.name}-*"))
    ]
    if not folders:
        return found
    wanted = _own_key(spec)
    for folder in folders:
        problem = check(folder, spec)
        if problem is None and wanted is not None and folder.name != f"{spec.name}-{wanted}":
            problem = "built by another compiler than the installed one"
        if problem is None:
            found.path = folder / f"{spec.name}.so"
            return found
        found.refused.append((folder, problem))
    return found


def _own_key(spec: ModuleSpec) -> str | None:
    from precast._jit.toolchain import find_toolchain

    if policy.refusal() is not None:
        return None
    try:
        return key(spec, find_toolchain(spec.arch, spec.cuda_major, spec.tvm_ffi_range))
    except ToolchainError:
        return None


def check(folder: Path, spec: ModuleSpec) -> str | None:
    """Why the build in ``folder`` cannot be used for ``spec``, or None."""
    library = folder / f"{spec.name}.so"
    try:
        meta = Meta.read(folder / META_NAME)
    except (OSError, ValueError, TypeError) as error:
        return f"{META_NAME} cannot be read ({error}). Fix: precast cache clear"
    if meta.fingerprint != spec.fingerprint:
        return "built from other sources or flags (its fingerprint differs)"
    for file, digest in meta.dependencies.items():
        if sha256_of(Path(file)) != digest:
            return f"{file}, which it includes, was changed or removed"
    return (
        path_problem(library)
        or trust_problem(library, folder / META_NAME, must_be_own=True)
        or _tvm_ffi.range_problem(*spec.tvm_ffi_range)
        or check_contents(library, meta.size, meta.sha256, "precast cache clear")
    )


# -- publishing -----------------------------------------------------------------------------------


def work_folder(root: Path, spec: ModuleSpec) -> Path:
    """A fresh private folder on the cache's own file system."""
    import tempfile

    parent = root / WORK_FOLDER
    own_folder(parent)
    _remove_stale(parent)
    return Path(tempfile.mkdtemp(prefix=f"{spec.name}-{_host()}-{os.getpid()}-", dir=parent))


def _host() -> str:
    """Where process numbers are this process's: machines and containers may share a cache."""
    try:
        namespace = re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        namespace = ""
    return re.sub(r"[^\w.]", "_", f"{os.uname().nodename}.{namespace}")


def publish(work: Path, target: Path, spec: ModuleSpec, meta: Meta) -> Path:
    """Move the finished library from ``work`` to ``target`` by one rename; return its path.

    If another process has published first, its build is used if it is valid, and replaced if it is
    not. On a shared file system that build may not be visible yet; then this process keeps its own
    copy.
    """
    staged = work / "publish"
    staged.mkdir(mode=0o700)
    library = staged / f"{spec.name}.so"
    (work / library.name).rename(library)
    (staged / META_NAME).write_text(meta.dump(), encoding="utf-8")
    staged.chmod(0o700)  # Whatever the umask is, which the linker follows, too.
    for path in (library, staged / META_NAME):
        path.chmod(0o644)
    for path in (library, staged / META_NAME, staged):
        _fsync(path)
    for folder in (target.parents[1], target.parent):
        own_folder(folder)
    for attempt in range(5):
        try:
            staged.rename(target)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            if check(target, spec) is None:
                return target / library.name
            if target.exists():
                # An invalid build is moved away, because a build is never changed in place.
                with contextlib.suppress(FileNotFoundError):
                    target.rename(work / f"refused-{attempt}")
            else:
                time.sleep(0.1 * 2**attempt)
        else:
            _fsync(target.parent)
            problem = check(target, spec)
            if problem is not None:
                raise OSError(errno.EACCES, problem, str(target))
            return target / library.name
    own = work.with_name(f"{work.name}-kept")
    staged.rename(own)
    return own / library.name


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_stale(parent: Path) -> None:
    for path in parent.iterdir():
        with contextlib.suppress(OSError):
            if _is_own_folder(path) and _is_left_over(path):
                shutil.rmtree(path, ignore_errors=True)


# -- inspection -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One build in the cache, for the command line."""

    folder: Path
    meta: Meta | None
    size: int
    modified: float


@dataclass
class Contents:
    """What lies in the cache: builds, leftovers of dead processes, and what is not precast's."""

    builds: list[Entry] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)


def contents(root: Path | None = None) -> Contents:
    """Look through the cache.

    A build is a real folder ``cu<N>-<machine>/<arch>/<name>-<16 hexadecimal digits>`` of this user
    without a symbolic link on the way; everything that has no place in the cache is foreign.
    """
    found = Contents()
    root = root or env.cache_dir()
    if not os.path.lexists(root):
        return found
    if not _is_own_folder(root):
        found.foreign.append(root)
        return found
    for major in sorted(root.iterdir()):
        if major.name == LOCK_FOLDER and _is_own_folder(major):
            continue
        if major.name == WORK_FOLDER and _is_own_folder(major):
            for path in sorted(major.iterdir()):
                if not _is_own_folder(path):
                    found.foreign.append(path)
                elif _is_left_over(path):
                    found.leftovers.append(path)
        elif not (_MAJOR_NAME.fullmatch(major.name) and _is_own_folder(major)):
            found.foreign.append(major)
        else:
            for arch in sorted(major.iterdir()):
                _look_through(arch, found)
    return found


def _look_through(arch: Path, found: Contents) -> None:
    if not (_ARCH_NAME.fullmatch(arch.name) and _is_own_folder(arch)):
        found.foreign.append(arch)
        return
    for folder in sorted(arch.iterdir()):
        if _BUILD_NAME.fullmatch(folder.name) and _is_own_folder(folder):
            found.builds.append(_entry(folder))
        else:
            found.foreign.append(folder)


def _entry(folder: Path) -> Entry:
    try:
        meta = Meta.read(folder / META_NAME)
    except (OSError, ValueError, TypeError):
        meta = None
    files = [p.lstat() for p in folder.iterdir()]
    modified = max((s.st_mtime for s in files), default=folder.lstat().st_mtime)
    return Entry(folder, meta, sum(s.st_size for s in files), modified)


def _is_own_folder(path: Path) -> bool:
    """Whether it is a folder of this user, and no symbolic link to one."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _is_left_over(path: Path) -> bool:
    """Whether the process of a private folder has died: by its number here, by age elsewhere."""
    match = _WORK_NAME.search(path.name)
    if match is not None and match["host"] == _host():
        return not Path("/proc", match["process"]).exists()
    return time.time() - path.lstat().st_mtime > STALE_SECONDS


def remove(folder: Path) -> None:
    """Remove one build by a rename, so that no reader sees half of it."""
    root = env.cache_dir()
    parent = root / WORK_FOLDER
    own_folder(parent)
    own_folder(folder)
    trash = parent / f"removed-{folder.name}-{_host()}-{os.getpid()}-0"
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def write_meta(
    spec: ModuleSpec,
    toolchain: Toolchain,
    library: Path,
    seconds: float,
    dependencies: dict[str, str] | None = None,
) -> Meta:
    data = library.read_bytes()
    return Meta(
        name=spec.name,
        arch=spec.arch.name,
        cuda_major=spec.cuda_major,
        fingerprint=spec.fingerprint,
        compiler=toolchain.identity,
        tvm_ffi=_tvm_ffi.version(),
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        compile_seconds=round(seconds, 3),
        dependencies=dependencies or {},
    )


def as_json(entry: Entry) -> dict[str, Any]:
    return {
        "folder": str(entry.folder),
        "size": entry.size,
        "modified": entry.modified,
        "meta": None if entry.meta is None else dataclasses.asdict(entry.meta),
    }
