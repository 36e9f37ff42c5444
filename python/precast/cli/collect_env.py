# SPDX-License-Identifier: Apache-2.0
"""Collect what a bug report needs: versions, machine, GPUs, compilers, settings, cache.

    precast collect-env
    precast collect-env --json > environment.json

It shows only precast's own environment variables and a few of CUDA and the compiler, and writes the
home directory as ~. If a part cannot be determined, it gives the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from precast.cli import _environment, _gpus, _machine, _output

EXIT_CODES = (0, 2, 3)
JSON = {
    "precast": "version, path, checkout (true or false) and plan_sha256",
    "system": "os, kernel, machine, libc, container, cpu, cores, memory and the Python environment",
    "packages": "name, version and perhaps problem of each package",
    "driver": "version, newest CUDA that it runs ([major, minor]) and perhaps problem",
    "gpus": "index, name, capability and memory of each GPU",
    "compilers": "name, version, path, origin, accepted and reason of each compiler",
    "providers": "label, source, root, manifest and perhaps problem of each provider",
    "jit": "policy, cache_dir and cache_writable",
    "gemm_table": "path of PRECAST_GEMM_TABLE, or null, text and perhaps problem",
    "cache": "directory, builds, size and states of the JIT cache",
    "variables": "the environment variables that are set, by name",
    "problems": "texts: each problem and its fix",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    report = _machine.without_home(collect())
    if args.json:
        _output.print_json(report)
        return 0
    _output.print_sections(_sections(report))
    for problem in report["problems"]:
        print(f"\nProblem: {problem}")
    return 0


def collect() -> dict[str, Any]:
    """Everything as plain data; a part that fails is ``{"error": text}``."""
    gpus, no_gpu = _gpus.find_gpus()
    parts: dict[str, Callable[[], Any]] = {
        "precast": _machine.precast_facts,
        "system": _machine.system,
        "packages": lambda: _environment.packages(bool(gpus), optional=True),
        "driver": lambda: _environment.driver(no_gpu),
        "gpus": lambda: _environment.gpu_rows(gpus),
        "compilers": _environment.compilers,
        "providers": _environment.providers,
        "jit": _environment.jit,
        "gemm_table": _environment.gemm_table,
        "cache": _machine.cache_state,
        "variables": _machine.settings,
    }
    report = {name: _attempt(part) for name, part in parts.items()}
    report["problems"] = [*_environment.problems(report), *_machine.unknown_settings()]
    return report


def _attempt(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:  # A report about a broken machine must not fail.
        return {"error": f"{type(error).__name__}: {error}"}


def _sections(report: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    rows: dict[str, list[tuple[str, ...]]] = {
        "precast": _facts(report["precast"], {"version": "text", "plan": "plan_sha256"}),
        "System": _facts(
            report["system"],
            {name: name for name in ("os", "kernel", "machine", "libc", "container", "cpu")}
            | {"cores": "cores_available", "memory": "memory_text"}
            | {"python": "python_executable", "environment": "python_environment"},
        ),
        **_environment.sections(report),
        "Cache": _facts(report["cache"], {"directory": "directory", "contents": "text"}),
        "Variables": [(name, str(value)) for name, value in report["variables"].items()],
    }
    rows["Variables"] = rows["Variables"] or [("none", "nothing is set")]
    return rows


def _facts(part: dict[str, Any], keys: dict[str, str]) -> list[tuple[str, ...]]:
    if "error" in part:
        return [("error", part["error"])]
    texts = {True: "yes", False: "no"}
    facts = {label: part[key] for label, key in keys.items()}
    return [(k, texts[v] if isinstance(v, bool) else str(v)) for k, v in facts.items()]
