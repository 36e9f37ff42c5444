# SPDX-License-Identifier: Apache-2.0
"""For the tests of bundles and installs: real wheels, as small as can be."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zipfile
from pathlib import Path

from cli_support import core_specs, write_provider

#: Neither an index nor the configuration of this machine takes part.
ALONE = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "", "PIP_CERT": ""}
PLAN = "precast/data/plan.json"


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    requires: tuple[str, ...] = (),
    tag: str = "py3-none-any",
    files: dict[str, str | bytes] | None = None,
    metadata: str = "",
) -> Path:
    """A real wheel, as small as can be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"]
    lines += [f"Requires-Dist: {text}\n" for text in requires]
    contents = {
        f"{info}/METADATA": "".join(lines),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
        **(files or {f"{name}.py": f"version = {version!r}\n"}),
    }
    write_wheel(path, {n: d.encode() if isinstance(d, str) else d for n, d in contents.items()})
    return path


def write_wheel(path: Path, contents: dict[str, bytes]) -> None:
    """Write the files, and the ``RECORD`` of them unless they have one."""
    (info,) = {n.partition("/")[0] for n in contents if ".dist-info/" in n}
    rows = [f"{name},{_digest(data)},{len(data)}\n" for name, data in contents.items()]
    record = "".join([*rows, f"{info}/RECORD,,\n"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in {f"{info}/RECORD": record.encode(), **contents}.items():
            archive.writestr(file, data)


def read_wheel(path: Path) -> dict[str, bytes]:
    """Its files but ``RECORD``, to be changed and written again."""
    with zipfile.ZipFile(path) as archive:
        return {n: archive.read(n) for n in archive.namelist() if not n.endswith("/RECORD")}


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"


def core_plan(arch: str = "sm90a") -> dict:
    modules = {s.name: {"fingerprints": {"cu13": {arch: s.fingerprint}}} for s in core_specs(arch)}
    return {"modules": modules}


def make_core(dist: Path, plan: dict | None = None, requires: tuple[str, ...] = ()) -> Path:
    extras = "Provides-Extra: jit\nProvides-Extra: cu13-sm90a\n"
    return make_wheel(
        dist,
        "precast",
        "0.1.0",
        (
            "torch>=2.9",
            "apache-tvm-ffi>=0.1.15,<0.2",
            "old-only; python_version < '3.12'",
            "new-only; python_version >= '3.12'",
            'compiler[tool]==1.*; extra == "jit"',
            'precast-jit-cache-cu13-sm90a==0.1.0; extra == "cu13-sm90a"',
            *requires,
        ),
        files={
            PLAN: json.dumps(plan or core_plan()),
            "precast/__init__.py": "__version__ = '0.1.0'\n",
        },
        metadata=extras,
    )


def make_provider(
    dist: Path, scratch: Path, arch: str = "sm90a", tag: str = "py3-none-manylinux_2_28_x86_64"
) -> Path:
    root = write_provider(scratch / arch, core_specs(arch))
    package = f"precast_jit_cache_cu13_{arch}"
    files: dict[str, str | bytes] = {
        f"{package}/{p.relative_to(root)}": p.read_bytes() for p in root.rglob("*.*")
    }
    files[f"{package}-0.1.0.dist-info/entry_points.txt"] = (
        f"[precast.jit_cache]\ncu13-{arch} = {package}\n"
    )
    requires = ("apache-tvm-ffi>=0.1.15,<0.1.17", "nvidia-cuda-runtime==13.*")
    return make_wheel(dist, package, "0.1.0", requires, tag, files)
