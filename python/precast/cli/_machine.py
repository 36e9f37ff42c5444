# SPDX-License-Identifier: Apache-2.0
"""More facts for ``precast collect-env``: the system, the settings, the cache and the plan."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precast.cli._output import human_size

#: Settings of CUDA and the host compiler that change what precast does; others are not shown.
CUDA_VARIABLES = (
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "NVIDIA_VISIBLE_DEVICES",
    "CXX",
)


def precast_facts() -> dict[str, Any]:
    """Version, place and hash of the plan; equal hashes load equal modules."""
    from precast._base.version import __version__
    from precast._plan.places import checkout_root
    from precast._runtime.loader import loader

    text = json.dumps(loader.document, sort_keys=True, separators=(",", ":"))
    plan = hashlib.sha256(text.encode()).hexdigest()
    here = Path(__file__).resolve().parents[1]
    kind = "installed" if checkout_root() is None else "a checkout"
    return {
        "version": __version__,
        "path": str(here),
        "checkout": checkout_root() is not None,
        "plan_sha256": plan,
        "text": f"{__version__}, {kind}, {here}",
    }


def system() -> dict[str, Any]:
    """The operating system, and the hardware without the GPUs."""
    from precast._jit.jobs import available_cores, available_memory

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "os": _os_name(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": libc(),
        "container": any(Path(p).exists() for p in ("/.dockerenv", "/run/.containerenv")),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "cores_available": available_cores(),
        "memory": total,
        "memory_available": available_memory(),
        "memory_text": f"{human_size(total)}, {human_size(available_memory())} available",
        "python_executable": sys.executable,
        "python_environment": _environment_kind(),
    }


def libc() -> str:
    """The C library, such as ``glibc 2.36``, or ``not glibc``."""
    try:
        return str(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError):
        return "not glibc"


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^(?:model name|Model)\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def _environment_kind() -> str:
    if made_by_uv():
        return "a virtual environment of uv"
    if sys.prefix != sys.base_prefix:
        return "a virtual environment"
    return "conda" if (Path(sys.prefix) / "conda-meta").is_dir() else "no virtual environment"


def made_by_uv() -> bool:
    """Whether uv made the environment of this interpreter; such an environment has no pip."""
    try:
        text = (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^uv\s*=", text, re.MULTILINE) is not None


def settings() -> dict[str, str]:
    """The variables of precast and the named ones of CUDA that are set.

    A variable that only looks like one of precast's has its value hidden, which may be secret.
    """
    from precast._base import env as _env

    known = {row.name for row in _env.REGISTRY} | set(CUDA_VARIABLES)
    return {
        name: value if name in known else "(not shown)"
        for name, value in sorted(os.environ.items())
        if name in known or name.startswith("PRECAST_")
    }


def unknown_settings() -> list[str]:
    """Problems of variables that look like precast's, but that nothing reads."""
    import difflib

    from precast._base import env as _env

    known = [row.name for row in _env.REGISTRY]
    texts = []
    for name in settings():
        if name.startswith("PRECAST_") and name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.8)
            fix = f"set {near[0]} instead" if near else f"unset {name}"
            texts.append(f"{name} is not a variable of precast: it has no effect. Fix: {fix}")
    return texts


def cache_state() -> dict[str, Any]:
    """The JIT cache of this user in numbers."""
    from precast._jit import cache
    from precast._jit.env import cache_dir
    from precast.cli._builds import judged_builds

    rows = judged_builds(cache.contents())
    states = [row.state for row in rows]
    size = sum(row.entry.size for row in rows)
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items())
    return {
        "directory": str(cache_dir()),
        "builds": len(rows),
        "size": size,
        "states": counts,
        "text": f"{len(rows)} builds, {human_size(size)}" + (f": {summary}" if summary else ""),
    }


def without_home(value: Any) -> Any:
    """Replace the home directory by ``~`` in all texts of nested plain data."""
    homes = {os.environ.get("HOME", "")}
    with contextlib.suppress(RuntimeError):  # The user has no home directory.
        homes.add(str(Path.home()))
    homes -= {"", "/"}
    if not homes:
        return value
    places = "|".join(re.escape(home.rstrip("/")) for home in sorted(homes, key=len, reverse=True))
    return _replaced(value, re.compile(rf"(?<![\w./-])(?:{places})(?![\w.-])"))


def _replaced(value: Any, home: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return home.sub("~", value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, home) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, home) for item in value]
    return value
