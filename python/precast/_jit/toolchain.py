# SPDX-License-Identifier: Apache-2.0
"""Find a CUDA toolkit and a host compiler, and check that they fit together before compiling.

A toolkit of the machine is used if it is new enough, otherwise the one that
``pip install "precast[jit]"`` installs.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from precast._base import env as _env
from precast._base import tvm_ffi as _tvm_ffi
from precast._base.driver import driver_cuda_version
from precast._base.errors import ToolchainError
from precast._jit.hermetic import compiler_environment
from precast._plan.config import Arch, CudaMajor, load_config
from precast._plan.places import source_root

INSTALL_HINT = 'pip install "precast[jit]"'
SYSTEM_TOOLKIT = Path("/usr/local/cuda")

P = ParamSpec("P")
T = TypeVar("T")
#: Inside of :func:`searching_once`, the functions that search, with what they have found.
_searches: ContextVar[dict[Callable[..., Any], Any] | None] = ContextVar("searches", default=None)


@contextmanager
def searching_once() -> Iterator[None]:
    """Search this machine once for each target, for a caller that asks about many modules."""
    token = _searches.set({})
    try:
        yield
    finally:
        _searches.reset(token)


def _once(search: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(search)
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        memory = _searches.get()
        if memory is None:
            return search(*args, **kwargs)
        remembered: Callable[P, T] = memory.setdefault(search, functools.cache(search))
        return remembered(*args, **kwargs)

    return found


def for_host_compiler(flag: str) -> str:
    """``flag`` for the host compiler as an argument of nvcc, quoted for commas and for a shell."""
    return "-Xcompiler=" + re.sub(r"([^\w./@%+=:-])", r"\\\\\\\1", flag)


@dataclass(frozen=True)
class Toolkit:
    """One CUDA toolkit."""

    origin: str
    nvcc: Path
    version: tuple[int, int]
    build: str
    include: Path
    cudart: Path
    cccl: Path | None = None

    @property
    def major(self) -> int:
        return self.version[0]

    def __str__(self) -> str:
        return f"nvcc {self.build} ({self.origin}, {self.nvcc})"


@dataclass(frozen=True)
class Toolchain:
    """A toolkit with a host compiler and the headers and libraries of tvm-ffi."""

    toolkit: Toolkit
    host_compiler: Path
    host_version: str
    tvm_ffi_include: Path
    tvm_ffi_library: Path

    def nvcc_command(self) -> list[str]:
        return [str(self.toolkit.nvcc), f"-ccbin={self.host_compiler}"]

    @property
    def fatbinary(self) -> Path:
        """The tool with which nvcc packs machine code, too."""
        return self.toolkit.nvcc.with_name("fatbinary")

    def include_flags(self, cuda: bool, ffi_in_cuda: bool = False) -> list[str]:
        """The folders of third-party headers, without those that nvcc finds by itself.

        ``ffi_in_cuda`` adds the headers of tvm-ffi for nvcc. ``__FILE__`` does not contain paths of
        this machine, whether or not the compiler resolves symbolic links.
        """
        nvcc, ffi = self.toolkit.nvcc, self.tvm_ffi_include
        homes = (ffi, ffi.resolve(), nvcc.parents[1], nvcc.resolve().parents[1])
        names = [f"-ffile-prefix-map={home}/=" for home in dict.fromkeys(homes)]
        if cuda:
            folders = [f"-isystem={ffi}"] if ffi_in_cuda else []
            return [*folders, *map(for_host_compiler, names)]
        headers = [ffi, self.toolkit.include]
        if self.toolkit.cccl is not None:
            headers.append(self.toolkit.cccl)
        return [*(f"-isystem{folder}" for folder in headers), *names]

    @property
    def libraries(self) -> list[str]:
        """The libraries to link, by full path; a module records their sonames alone."""
        return [str(self.toolkit.cudart), str(self.tvm_ffi_library)]

    @property
    def identity(self) -> str:
        """The versions of the compilers, which a JIT cache key has besides the fingerprint."""
        return f"nvcc {self.toolkit.build}; {self.host_version}"


@_once
def find_toolchain(
    arch: Arch | None = None,
    cuda_major: int | None = None,
    tvm_ffi_range: tuple[str, str] | None = None,
) -> Toolchain:
    """The toolchain that compiles for ``arch``, against a tvm-ffi in ``[low, high)``.

    Raises
    ------
    ToolchainError
        If there is none, or its parts do not fit together. The message lists each candidate, why it
        was refused, and the command that fixes it.
    """
    toolkit = find_toolkit(arch, cuda_major)
    host, version = host_compiler()
    include, library = _find_tvm_ffi()
    problem = None if tvm_ffi_range is None else _tvm_ffi.range_problem(*tvm_ffi_range)
    if problem is not None:
        raise ToolchainError(f"precast {problem}")
    return Toolchain(toolkit, host, version, include, library)


@_once
def find_toolkit(arch: Arch | None = None, cuda_major: int | None = None) -> Toolkit:
    """The first toolkit that can target ``arch``, has ``cuda_major`` and fits the driver."""
    refused = []
    for toolkit in candidates():
        problem = unsuitable(toolkit, arch, cuda_major)
        if problem is None:
            return toolkit
        refused.append(f"  {toolkit}: {problem}")
    tried = "\n".join(refused) if refused else "  no nvcc in PRECAST_CUDA_HOME, CUDA_HOME, PATH, "
    tried += "" if refused else "/usr/local/cuda or the Python environment"
    what = "" if arch is None else f" for {arch.name}"
    fix_hint = INSTALL_HINT
    pypi = {major for major, row in _planned_majors().items() if row.toolkit_on_pypi}
    if cuda_major is not None and cuda_major not in pypi:
        fix_hint = f"install a CUDA {cuda_major} toolkit and set PRECAST_CUDA_HOME to its folder"
    raise ToolchainError(f"no CUDA compiler{what}:\n{tried}\nFix: {fix_hint}")


def unsuitable(
    toolkit: Toolkit, arch: Arch | None = None, cuda_major: int | None = None
) -> str | None:
    """Why ``toolkit`` cannot compile for ``arch`` and ``cuda_major`` here, or None."""
    if toolkit.major == 0:
        return "it does not run (nvcc --version failed)"
    if cuda_major is not None and toolkit.major != cuda_major:
        return f"CUDA {toolkit.major}, but CUDA {cuda_major} is required"
    if toolkit.major not in _planned_majors():
        legal = ", ".join(map(str, _planned_majors()))
        return f"CUDA {toolkit.major} is not supported; legal: {legal}"
    if arch is not None and toolkit.version < arch.cuda:
        return f"cannot target {arch.sass} (needs >= {arch.cuda[0]}.{arch.cuda[1]})"
    headers = _header_version(toolkit.include)
    if headers != toolkit.version:
        got = "none" if headers is None else f"CUDA {headers[0]}.{headers[1]}"
        return f"its headers in {toolkit.include} are {got}: compiler and headers do not agree"
    if not toolkit.cudart.exists():
        return f"its {toolkit.cudart} is missing"
    driver = driver_cuda_version()
    if driver is not None and driver[0] < toolkit.major:
        return f"the driver runs CUDA {driver[0]}.{driver[1]} only"
    return None


@functools.cache
def _planned_majors() -> Mapping[int, CudaMajor]:
    return load_config(source_root()).build.cuda


def candidates() -> Iterator[Toolkit]:
    """The toolkits of this machine, then the one of the Python environment, without duplicates."""
    seen = set()
    for origin, home in _system_homes():
        nvcc = home / "bin" / "nvcc"
        if origin == "PRECAST_CUDA_HOME" and not nvcc.is_file():
            raise ToolchainError(
                f"PRECAST_CUDA_HOME={home} has no bin/nvcc. Fix: correct or unset it"
            )
        if nvcc.is_file() and nvcc.resolve() not in seen:
            seen.add(nvcc.resolve())
            yield _system_toolkit(origin, home, nvcc)
    toolkit = _python_toolkit()
    if toolkit is not None and toolkit.nvcc.resolve() not in seen:
        yield toolkit


def _system_homes() -> Iterator[tuple[str, Path]]:
    if _env.CUDA_HOME():
        yield "PRECAST_CUDA_HOME", Path(_env.CUDA_HOME()).absolute()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield name, Path(os.environ[name]).absolute()
    on_path = shutil.which("nvcc")
    if on_path is not None:
        # nvcc on PATH may be a script or a link outside of its toolkit, so nvcc itself is asked.
        yield "PATH", _nvcc_home(str(Path(on_path).absolute()))
    yield "system", SYSTEM_TOOLKIT


def _system_toolkit(origin: str, home: Path, nvcc: Path) -> Toolkit:
    includes = itertools.chain([home / "include"], home.glob("targets/*/include"))
    include = next(filter(_header_version, includes), None)
    return _toolkit(origin, nvcc, include or home / "include", [home / "lib64", home / "lib"])


def _python_toolkit() -> Toolkit | None:
    """The toolkit of the Python environment, which has ``lib/`` and only versioned libraries."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("nvidia") is None:
        return None
    try:
        from cuda import pathfinder
    except ImportError:
        return None
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc")):
            home = nvcc.parents[1]
            cccl = pathfinder.find_nvidia_header_directory("cccl")
            return _toolkit(
                "Python environment",
                nvcc,
                home / "include",
                [home / "lib"],
                Path(cccl) if cccl and Path(cccl).is_relative_to(home) else None,
            )
    return None


def _toolkit(
    origin: str, nvcc: Path, include: Path, libs: list[Path], cccl: Path | None = None
) -> Toolkit:
    version, build = _nvcc_version(str(nvcc))
    name = f"libcudart.so.{version[0]}"
    found = [lib / name for lib in libs if (lib / name).exists()]
    cudart = found[0] if found else libs[0] / name
    return Toolkit(origin, nvcc, version, build, include, cudart, cccl)


@functools.cache
def _nvcc_home(nvcc: str) -> Path:
    """The folder of the toolkit that an nvcc belongs to, as nvcc reports it."""
    out = _output([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull])
    match = re.search(r"_HERE_=(\S+)", out)
    return Path(match[1]).parent if match else Path(nvcc).resolve().parents[1]


@functools.cache
def _nvcc_version(nvcc: str) -> tuple[tuple[int, int], str]:
    """``((13, 0), "13.0.88")``, or ``((0, 0), "?")`` if nvcc does not run."""
    out = _output([nvcc, "--version"])
    release = re.search(r"release (\d+)\.(\d+)", out)
    build = re.search(r"\bV(\d[\d.]*)", out)
    if release is None:
        return (0, 0), "?"
    return (int(release[1]), int(release[2])), build[1] if build else release[0]


@functools.cache
def _header_version(include: Path) -> tuple[int, int] | None:
    try:
        text = (include / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return divmod(int(match[1]) // 10, 100) if match else None


def view_directory(toolkit: Toolkit, folder: Path) -> Path:
    """Make links to ``toolkit`` in the layout that CMake's CUDA detection expects.

    The packages of PyPI have ``lib`` instead of ``lib64``, and only versioned names in it. nvcc
    searches for its programs next to the path by which it was called, so ``bin`` is a folder of
    links and not a link itself. Returns ``folder``.
    """
    home = toolkit.nvcc.resolve().parents[1]
    links = {"include": toolkit.include, "nvvm": home / "nvvm"}
    links.update({f"bin/{path.name}": path for path in (home / "bin").iterdir()})
    links.update({f"lib64/{path.name}": path for path in toolkit.cudart.parent.iterdir()})
    links["lib64/libcudart.so"] = toolkit.cudart
    for stale in {*folder.glob("bin/*"), *folder.glob("lib64/*")}:
        if f"{stale.parent.name}/{stale.name}" not in links:
            stale.unlink()
    for name, target in links.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            if link.readlink() == target:
                continue
            link.unlink()
        link.symlink_to(target)
    return folder


def host_compiler() -> tuple[Path, str]:
    """The host C++ compiler and the first line of its ``--version``.

    Raises
    ------
    ToolchainError
        If there is none.
    """
    wanted = os.environ.get("CXX", "").strip()
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found is not None:
            path = Path(found).absolute()  # Compilers run in other folders.
            return path, _first_line(str(path))
    asked = (
        f"CXX={wanted} is not a program" if wanted else "neither g++, c++ nor clang++ is on PATH"
    )
    raise ToolchainError(
        f"no host C++ compiler: {asked}. Fix: install one (apt-get install g++, dnf install "
        f"gcc-c++), or set CXX"
    )


@functools.cache
def _first_line(compiler: str) -> str:
    return (_output([compiler, "--version"]).splitlines() or [compiler])[0]


def _find_tvm_ffi() -> tuple[Path, Path]:
    # find_spec does not import the package, which would pull torch in.
    spec = importlib.util.find_spec("tvm_ffi")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        include, library = Path(folder) / "include", Path(folder) / "lib" / "libtvm_ffi.so"
        if (include / "tvm" / "ffi" / "c_api.h").is_file() and library.is_file():
            return include, library
    raise ToolchainError(
        "the headers of tvm-ffi were not found. Fix: pip install --force-reinstall apache-tvm-ffi"
    )


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=60,
            env=compiler_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
