# SPDX-License-Identifier: Apache-2.0
"""For the tests of the command line: run it, and make providers and cache entries out of bytes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import pty
import re
import struct
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import precast
from precast._base.shared_object import EXPORT_PREFIX
from precast._plan.installed import plan
from precast._plan.spec import ModuleSpec
from precast._runtime.manifest import Manifest, ModuleRow

PACKAGES = str(Path(precast.__file__).resolve().parents[1])


def run(
    *argv: str, stdout: IO[str] | int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python -m precast ARGV`` as a process of its own, with no setting of this machine."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PRECAST_", "CUDA_", "CXX"))}
    env.update({"PYTHONPATH": PACKAGES, **environment})
    return subprocess.run(
        [sys.executable, "-m", "precast", *argv],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def on_terminal(*argv: str, error_only: bool = False, **environment: str) -> tuple[str, str, int]:
    """The same with a terminal: standard output and error as they were drawn, and the exit code.

    ``error_only`` leaves standard output a pipe, as in ``precast list --json | jq``.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PRECAST_", "CUDA_", "CXX"))}
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CI"):
        env.pop(name, None)
    env.update({"PYTHONPATH": PACKAGES, "TERM": "xterm", "COLUMNS": "200", **environment})
    ends = [os.pipe() if error_only else pty.openpty(), pty.openpty()]
    with subprocess.Popen(
        [sys.executable, "-m", "precast", *argv],
        stdin=subprocess.DEVNULL,
        stdout=ends[0][1],
        stderr=ends[1][1],
        env=env,
    ) as process:
        for _, inner in ends:
            os.close(inner)
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.map(_read_all, [outer for outer, _ in ends])
        return out, err, process.wait(60)


def _read_all(end: int) -> str:
    data = b""
    while True:
        try:
            piece = os.read(end, 1 << 16)
        except OSError:  # what Linux says at the end of a terminal
            piece = b""
        if not piece:
            os.close(end)
            return data.decode()
        data += piece


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")


def core_specs(arch: str) -> list[ModuleSpec]:
    return [*specs_of("core", (arch,))]


@functools.cache
def specs_of(
    profile: str | None, archs: tuple[str, ...], major: int | None = None
) -> tuple[ModuleSpec, ...]:
    """The same objects for each test: each reads the sources of its fingerprint once."""
    return tuple(plan().modules(profile, plan().archs(archs), major))


def fake_library(text: str, exports: Iterable[str] = (), machine: int | None = None) -> bytes:
    """The header of a shared library for this machine, and the names of its functions."""
    here = {"x86_64": 62, "aarch64": 183}[platform.machine()]
    header = struct.pack("<16s2HI3QI6H", b"\x7fELF\x02\x01\x01", 3, machine or here, *[0] * 11)
    names = "".join(f"\0{EXPORT_PREFIX}{name}\0" for name in exports)
    return header + text.encode() + names.encode()


def write_provider(root: Path, specs: list[ModuleSpec], **changes: object) -> Path:
    """A provider of files that hold only names; ``changes`` go into the manifest."""
    rows = []
    for spec in specs:
        path = root / spec.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fake_library(f"module {spec.file_name}", spec.exports))
        data = path.read_bytes()
        rows.append(
            ModuleRow(
                name=spec.name,
                arch=spec.arch.name,
                file=spec.file_name,
                fingerprint=spec.fingerprint,
                size=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
                exports=spec.exports,
                sass=(spec.arch.sass,),
                needed=("libc.so.6", spec.cudart, "libtvm_ffi.so"),
            )
        )
    build = plan().build
    fields: dict[str, object] = {
        "distribution": f"precast-jit-cache-cu13-{specs[0].arch.name}",
        "version": precast.__version__,
        "cuda_major": 13,
        "toolkit": "13.0",
        "min_driver": "580",
        "machine": platform.machine(),
        "tvm_ffi_built": "0.1.15",
        "tvm_ffi_min": build.tvm_ffi_min,
        "tvm_ffi_max_exclusive": build.tvm_ffi_max_exclusive,
        "modules": tuple(rows),
        **changes,
    }
    (root / "manifest.json").write_text(Manifest(**fields).dump())  # type: ignore[arg-type]
    return root


def edit_manifest(root: Path, module: str, **changes: object) -> None:
    path = root / "manifest.json"
    data = json.loads(path.read_text())
    for row in data["modules"]:
        if row["name"] == module:
            row.update(changes)
    path.write_text(json.dumps(data))
