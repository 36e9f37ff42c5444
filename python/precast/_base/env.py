# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of precast, with its meaning, default and strict parser."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from precast._base.errors import EnvironmentVariableError

T = TypeVar("T")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class _Row(NamedTuple):
    name: str
    default: str
    doc: str


#: All variables in order of declaration; the documentation is generated from this list.
REGISTRY: list[_Row] = []


class EnvVar(Generic[T]):
    """One variable. A call reads and parses it; unset or empty means the default."""

    def __init__(self, name: str, default: T, parse: Callable[[str, str], T], doc: str) -> None:
        self.name = name
        self.default = default
        self._parse = parse
        REGISTRY.append(_Row(name, "" if default is None else str(default), doc))

    def __call__(self) -> T:
        raw = os.environ.get(self.name, "").strip()
        return self._parse(self.name, raw) if raw else self.default


def _flag(name: str, raw: str) -> bool:
    word = raw.lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise EnvironmentVariableError(
        f"{name}={raw!r} is not a boolean; legal: {', '.join(_TRUE)} or {', '.join(_FALSE)}"
    )


def _choice(*legal: str) -> Callable[[str, str], str]:
    def parse(name: str, raw: str) -> str:
        if raw.lower() not in legal:
            raise EnvironmentVariableError(f"{name}={raw!r} is unknown; legal: {', '.join(legal)}")
        return raw.lower()

    return parse


def _positive_int(name: str, raw: str) -> int:
    if not raw.isdecimal() or int(raw) < 1:
        raise EnvironmentVariableError(f"{name}={raw!r} is not a whole number of at least 1")
    return int(raw)


def _level(name: str, raw: str) -> int:
    if raw not in ("0", "1", "3", "5", "10"):
        raise EnvironmentVariableError(f"{name}={raw!r} is not a level; legal: 0, 1, 3, 5, 10")
    return int(raw)


def _positive_float(name: str, raw: str) -> float:
    try:
        value = float(raw)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise EnvironmentVariableError(f"{name}={raw!r} is not a number above 0")
    return value


def _seconds(name: str, raw: str) -> float:
    try:
        value = float(raw)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise EnvironmentVariableError(f"{name}={raw!r} is not a number of seconds")
    return value


def _overlay(name: str, raw: str) -> str:
    if raw.partition(":")[0] != "overlay":
        raise EnvironmentVariableError(
            f"{name}={raw!r} is unknown; legal: overlay, or overlay:<modules of flashinfer>, such "
            f"as overlay:norm,rope"
        )
    return raw


def _text(name: str, raw: str) -> str:
    return raw


REFERENCE = EnvVar(
    "PRECAST_REFERENCE",
    False,
    _flag,
    "1 runs every op's plain PyTorch reference, on CPU tensors too.",
)
TRACE_DUMP = EnvVar(
    "PRECAST_TRACE_DUMP",
    False,
    _flag,
    "1, when precast is imported, writes the definition of every distinct call of an op as JSON.",
)
TRACE_DUMP_DIR = EnvVar(
    "PRECAST_TRACE_DUMP_DIR",
    "precast_trace",
    _text,
    "Where PRECAST_TRACE_DUMP writes: definitions/<op_type>/<name>.json, the layout of "
    "flashinfer-bench.",
)
JIT = EnvVar(
    "PRECAST_JIT",
    "auto",
    _choice("auto", "warn", "error"),
    "What to do when a kernel must be compiled: auto compiles and logs it, warn compiles with a "
    "warning, error raises MissingKernelError instead.",
)
CACHE_DIR = EnvVar(
    "PRECAST_CACHE_DIR",
    "",
    _text,
    "Where JIT-compiled modules live (default: the user cache directory of the platform).",
)
AS_FLASHINFER = EnvVar(
    "PRECAST_AS_FLASHINFER",
    "",
    _overlay,
    "overlay: an installed FlashInfer runs precast's ops where precast has them; overlay:norm,rope "
    "those of these modules of FlashInfer alone.",
)
KERNEL_DIR = EnvVar(
    "PRECAST_KERNEL_DIR",
    "",
    _text,
    "A build tree with a manifest.json, which comes before every other source (for developers).",
)
PROVIDER_PATH = EnvVar(
    "PRECAST_PROVIDER_PATH",
    "",
    _text,
    f"Unpacked providers, or folders of them, separated by {os.pathsep!r}; for read-only mounts.",
)
CUDA_ARCH_LIST = EnvVar(
    "PRECAST_CUDA_ARCH_LIST",
    "",
    _text,
    "Targets to build for, such as '8.0 9.0a' (default: the GPUs present).",
)
GEMM_TABLE = EnvVar(
    "PRECAST_GEMM_TABLE",
    "",
    _text,
    "A file of `precast tune gemm`: the tiles that products on Hopper take for its shapes. Give "
    "every rank the same file.",
)
PROFILE = EnvVar("PRECAST_PROFILE", "core", _text, "The profile that a provider is built from.")
CUDA_MAJOR = EnvVar(
    "PRECAST_CUDA",
    0,
    _positive_int,
    "The CUDA major that a provider build is for, such as 13 (default: that of the toolkit).",
)
CUDA_HOME = EnvVar(
    "PRECAST_CUDA_HOME", "", _text, "The CUDA toolkit to compile with, before CUDA_HOME and PATH."
)
LOCK_TIMEOUT = EnvVar(
    "PRECAST_LOCK_TIMEOUT",
    300.0,
    _seconds,
    "How many seconds a process waits for another one that compiles the same module.",
)
COMM_TIMEOUT = EnvVar(
    "PRECAST_COMM_TIMEOUT",
    0.0,
    _seconds,
    "For debugging: seconds after which a kernel that waits for another GPU fails, with an error "
    "that names both ranks; ranks then also compare the shapes of each all-reduce (default: 0, no "
    "limit).",
)
MAX_JOBS = EnvVar(
    "MAX_JOBS",
    0,
    _positive_int,
    "The maximum of compilers at once (default: from cores and free memory).",
)
LOGLEVEL = EnvVar(
    "PRECAST_LOGLEVEL",
    0,
    _level,
    "What is logged of each call of the public API: 0 nothing, 1 its name, 3 inputs and outputs, "
    "5 statistics of tensors, 10 dumps for precast replay. Read when precast is imported.",
)
LOGDEST = EnvVar(
    "PRECAST_LOGDEST",
    "stdout",
    _text,
    "Where PRECAST_LOGLEVEL writes: stdout, stderr or a file; %i in its name is the process id.",
)
DUMP_DIR = EnvVar(
    "PRECAST_DUMP_DIR",
    "precast_dumps",
    _text,
    "The folder in which PRECAST_LOGLEVEL=10 makes a folder for each call.",
)
DUMP_MAX_COUNT = EnvVar(
    "PRECAST_DUMP_MAX_COUNT", 1000, _positive_int, "The maximum of calls that a process dumps."
)
DUMP_MAX_SIZE_GB = EnvVar(
    "PRECAST_DUMP_MAX_SIZE_GB",
    20.0,
    _positive_float,
    "The maximum size of the folder of dumps, in units of 10^9 bytes.",
)
DUMP_INCLUDE = EnvVar(
    "PRECAST_DUMP_INCLUDE",
    "",
    _text,
    "Patterns of functions to dump, such as 'rmsnorm,precast.activation.*' (default: all).",
)
DUMP_EXCLUDE = EnvVar(
    "PRECAST_DUMP_EXCLUDE",
    "",
    _text,
    "Patterns of functions that are not dumped, even if PRECAST_DUMP_INCLUDE matches them.",
)
