# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine for ``doctor`` and ``collect-env``, without torch and tvm-ffi."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from precast.cli._gpus import Gpu, driver_version
from precast.cli._output import human_size

#: Optional packages that change how JIT and the command line work; shown if installed.
_OPTIONAL = ("rich", "argcomplete", "cuda-pathfinder", "cuda-toolkit")


def report(gpus: Sequence[Gpu], no_gpu: str | None) -> dict[str, Any]:
    """Everything but the modules, as plain data with texts to print."""
    found: dict[str, Any] = {
        "packages": packages(bool(gpus)),
        "gpus": gpu_rows(gpus),
        "driver": driver(no_gpu),
        "compilers": compilers(),
        "providers": providers(),
        "jit": jit(),
        "gemm_table": gemm_table(),
    }
    return {**found, "problems": problems(found)}


def problems(found: Mapping[str, Any]) -> list[str]:
    """Problems of packages, driver or providers."""
    parts: list[Any] = [found["driver"]]
    for name in ("packages", "providers", "gemm_table"):
        parts += found[name] if isinstance(found[name], list) else [found[name]]
    return [part["problem"] for part in parts if part.get("problem")]


def sections(found: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """The rows of :func:`report` to print, by title; a part may be ``{"error": text}``."""
    provided = _rows(found["providers"], lambda p: (p["label"], p["text"]))
    return {
        "Packages": _rows(found["packages"], lambda p: (p["name"], p["text"])),
        "GPUs": [
            *_rows([found["driver"]], lambda d: ("driver", d["text"])),
            *_rows(
                found["gpus"],
                lambda g: (
                    f"cuda:{g['index']}",
                    f"{g['name']}, capability {g['capability']}, {g['memory_text']}",
                ),
            ),
        ],
        "Compilers": _rows(
            found["compilers"],
            lambda c: ("accepted" if c["accepted"] else "rejected", c["name"], c["reason"]),
        ),
        "Prebuilt modules": provided or [("none", "no provider is installed")],
        "JIT": _jit_rows(found["jit"]),
        "Products": _rows(found["gemm_table"], lambda t: ("tiles chosen by", t["text"])),
    }


def _jit_rows(part: Mapping[str, str]) -> list[tuple[str, ...]]:
    if "error" in part:
        return [("error", part["error"])]
    return [("policy", part["policy_text"]), ("cache", part["cache_text"])]


def _rows(part: Any, row: Callable[[Any], tuple[str, ...]]) -> list[tuple[str, ...]]:
    items = part if isinstance(part, list) else [part]
    return [("error", item["error"]) if "error" in item else row(item) for item in items]


def gpu_rows(gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    return [{**asdict(gpu), "memory_text": human_size(gpu.memory)} for gpu in gpus]


def packages(has_gpu: bool, optional: bool = False) -> list[dict[str, Any]]:
    """precast, Python and the dependencies; ``optional`` adds the extras that are installed."""
    from precast._base.version import __version__

    here = Path(__file__).resolve().parents[1]
    extras = [_package(name) for name in _OPTIONAL] if optional else []
    return [
        {"name": "precast", "version": __version__, "text": f"{__version__} ({here})"},
        {
            "name": "python",
            "version": platform.python_version(),
            "text": f"{platform.python_version()} ({platform.platform()})",
        },
        torch(has_gpu),
        *(_package(name) for name in _required() if name != "torch"),
        *(row for row in extras if row["version"] is not None),
    ]


@functools.cache
def _required() -> dict[str, Any]:
    """The requirements of precast by name, None without ``packaging``, which reads them.

    The range of tvm-ffi is that of the plan, which a checkout has, too.
    """
    from precast._runtime.loader import loader

    low, high = loader.document["tvm_ffi"]["min"], loader.document["tvm_ffi"]["max_exclusive"]
    lines = [f"apache-tvm-ffi>={low},<{high}", "filelock", "packaging", "platformdirs"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines = [*(importlib.metadata.requires("precast") or ()), lines[0]]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return dict.fromkeys(["apache-tvm-ffi", "filelock", "packaging", "platformdirs"])
    found = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate()]
    return {r.name: r for r in found}


def _package(name: str) -> dict[str, Any]:
    wanted = _required().get(name)
    fix_hint = f'Fix: pip install "{name}{"" if wanted is None else wanted.specifier}"'
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    # The package itself is what is imported: its metadata may be left of a broken installation.
    if version is None or (name == "packaging" and importlib.util.find_spec(name) is None):
        problem = f"{name} is not installed. {fix_hint}"
        return {"name": name, "version": None, "text": "not installed", "problem": problem}
    row = {"name": name, "version": version, "text": version}
    if wanted is not None and not wanted.specifier.contains(version, prereleases=True):
        row["problem"] = f"{name} {version} does not satisfy {wanted.specifier}. {fix_hint}"
    return row


def torch(has_gpu: bool) -> dict[str, Any]:
    """Version and CUDA of torch, without importing it."""
    row = _package("torch")
    if row["version"] is None:
        return row
    cuda = _torch_cuda()
    row["cuda"] = cuda
    row["text"] += f" (CUDA {cuda})" if cuda else " (CPU only)"
    if has_gpu and cuda is None:
        row["problem"] = (
            f"torch {row['version']} is a build without CUDA, so it cannot use the GPU. Fix: "
            f"install a CUDA build of torch"
        )
    return row


def _torch_cuda() -> str | None:
    """The CUDA version torch was built with, from its version file: importing torch is slow."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
        return match[1] if match else None
    return None


def driver(no_gpu: str | None) -> dict[str, Any]:
    """Version of the driver, and the newest CUDA that it runs."""
    from precast._base.driver import driver_cuda_version
    from precast._runtime.loader import loader

    cuda, version = driver_cuda_version(), driver_version()
    row: dict[str, Any] = {"version": version, "cuda": None if cuda is None else list(cuda)}
    if cuda is None:
        row["text"] = no_gpu or "unknown"
        return row
    row["text"] = f"{version or 'unknown version'}, runs CUDA up to {cuda[0]}.{cuda[1]}"
    if no_gpu is not None:
        row["text"] += f"; {no_gpu}"
    least = min(int(major) for major in loader.document["cuda"])
    if cuda[0] < least:
        row["problem"] = (
            f"this driver runs only CUDA {cuda[0]}.{cuda[1]}. Fix: update it to "
            f"{loader.document['cuda'][str(least)]['min_driver']} or later"
        )
    return row


# -- compilers ------------------------------------------------------------------------------------


def compilers() -> list[dict[str, Any]]:
    """Every nvcc found, in the order in which JIT tries them, and the host compiler."""
    from precast._base.errors import EnvironmentVariableError, ToolchainError
    from precast._jit import policy, toolchain

    refusal = None
    with contextlib.suppress(EnvironmentVariableError):  # jit() reports it.
        refusal = policy.refusal()
    if refusal is not None:  # A compiler may hang, and nothing would use it.
        return [_no_compiler("compilers", f"not started, because {refusal} forbids compiling")]
    rows: list[dict[str, Any]] = []
    for toolkit in toolchain.candidates():
        problem = toolchain.unsuitable(toolkit)
        reason = problem or ("used" if not any(r["accepted"] for r in rows) else "not needed")
        rows.append(
            {
                "name": str(toolkit),
                "version": ".".join(map(str, toolkit.version)),
                "path": str(toolkit.nvcc),
                "origin": toolkit.origin,
                "accepted": problem is None,
                "reason": reason,
            }
        )
    if not rows:
        problem = f"none was found. JIT needs one. Fix: {toolchain.INSTALL_HINT}"
        rows.append(_no_compiler("nvcc", problem))
    try:
        path, version = toolchain.host_compiler()
    except ToolchainError as error:
        rows.append(_no_compiler("host compiler", str(error)))
    else:
        rows.append(
            {
                "name": f"{version} ({path})",
                "version": version,
                "path": str(path),
                "origin": "host compiler",
                "accepted": True,
                "reason": "used",
            }
        )
    return rows


def _no_compiler(name: str, reason: str) -> dict[str, Any]:
    return {
        "name": name,
        "version": None,
        "path": None,
        "origin": None,
        "accepted": False,
        "reason": reason,
    }


# -- providers and JIT ----------------------------------------------------------------------------


def providers() -> list[dict[str, Any]]:
    """Every provider that the loader found."""
    from precast._runtime.loader import loader
    from precast._runtime.providers import provider_problem

    rows = []
    for provider in loader.providers:
        manifest = provider.manifest
        row: dict[str, Any] = {
            "label": provider.label,
            "source": provider.source,
            "root": str(provider.root),
            "manifest": None,
        }
        if manifest is None:
            row["problem"] = row["text"] = str(provider.problem)
        else:
            data = manifest._asdict()
            data["modules"] = len(manifest.modules)
            row["manifest"] = {**data, "archs": manifest.archs}
            row["text"] = (
                f"{len(manifest.modules)} modules for {', '.join(manifest.archs)}, CUDA "
                f"{manifest.toolkit}, {manifest.machine}, {provider.root}"
            )
            problem = provider_problem(manifest)
            if problem is not None:
                row["problem"] = f"{provider.label}: {problem}"
                row["text"] = f"{problem} ({provider.root})"
        rows.append(row)
    return rows


def jit() -> dict[str, Any]:
    """The policy for a module that is not prebuilt."""
    from precast._base import env as _env
    from precast._jit import env, policy

    refusal = policy.refusal()
    effect = f"never compiles ({refusal})" if refusal else "compiles"
    place = env.cache_dir()
    writable = _writable(place)
    return {
        "policy": _env.JIT(),
        "policy_text": f"{_env.JIT()}: {effect}",
        "cache_dir": str(place),
        "cache_writable": writable,
        "cache_text": str(place) + ("" if writable else " (not writable)"),
    }


def gemm_table() -> dict[str, Any]:
    """The tuning table of products, if one is in use."""
    from precast._base.errors import EnvironmentVariableError
    from precast._plan import gemm_table

    try:
        table = gemm_table.current()
    except EnvironmentVariableError as error:
        return {"path": None, "text": f"none: {error}", "problem": str(error)}
    if table is None:
        return {"path": None, "text": "the cost model; PRECAST_GEMM_TABLE is not set"}
    return {"path": str(table.path), "text": f"{table}; other shapes by the cost model"}


@functools.cache
def _writable(path: Path) -> bool:
    """Whether the folder is writable or could be created; nothing is created."""
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        return False
    return os.access(path, os.W_OK | os.X_OK) and not os.statvfs(path).f_flag & os.ST_RDONLY
