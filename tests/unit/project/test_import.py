# SPDX-License-Identifier: Apache-2.0
"""``import precast`` is inert and quick."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import PACKAGES, core_specs, write_provider

# Every event by which a process could touch the world; reading files is allowed.
WATCH = """
import os, sys
seen = []
def hook(event, args):
    if event == "open":
        path, mode, flags = args
        written = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if written and "__pycache__" not in str(path):
            seen.append((event, str(path)))
    elif event in {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.chmod",
                   "os.truncate", "os.link", "shutil.rmtree", "tempfile.mkdtemp", "os.fork",
                   "subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.putenv",
                   "ctypes.dlopen", "socket.connect", "socket.bind", "socket.getaddrinfo"}:
        if (event, args) != ("ctypes.dlopen", (None,)):  # import ctypes opens the program itself.
            seen.append((event, repr(args)))
sys.addaudithook(hook)
import precast, precast.jit
heavy = sorted({"torch", "tvm_ffi", "numpy", "filelock", "platformdirs", "packaging", "subprocess",
                "rich", "tomllib", "ast", "inspect", "precast.cli", "precast.norm", "precast.trace",
                "precast.decorators", "precast._op.dispatch"} & set(sys.modules))
print(seen, heavy)
"""


def python(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES, **environment}
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """The package as a wheel installs it: with its data and a plan, outside the checkout."""
    import json
    import shutil

    from precast._plan.installed import plan
    from precast._plan.places import SOURCE_FOLDERS, source_root

    package = tmp_path / "site" / "precast"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(PACKAGES) / "precast", package, ignore=ignored)
    for folder in SOURCE_FOLDERS:
        shutil.copytree(source_root() / folder, package / "data" / folder, ignore=ignored)
    (package / "data" / "plan.json").write_text(json.dumps(plan().document))
    return str(package.parent)


def test_import_touches_nothing(installed, tmp_path):
    provider = write_provider(tmp_path / "provider", core_specs("sm90a"))
    environment = {
        "PYTHONPATH": installed,
        "PRECAST_PROVIDER_PATH": str(provider),
        "HOME": str(tmp_path / "no-home"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    assert python("-c", WATCH, **environment).stdout == "[] []\n"
    assert not (tmp_path / "no-home").exists()


def test_import_succeeds_where_a_provider_is_broken(installed, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "manifest.json").write_bytes(b"\xff{")
    code = "import precast; print(precast._runtime.loader.loader.providers[0].problem)"
    done = python("-c", code, PYTHONPATH=installed, PRECAST_KERNEL_DIR=str(broken))
    assert "is damaged (not JSON)" in done.stdout
    assert done.stderr == ""


def test_import_from_a_read_only_place_without_a_home(installed):
    for path in [Path(installed), *Path(installed).rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    code = "import precast; print(precast.__version__)"
    assert python("-c", code, PYTHONPATH=installed, HOME="/nonexistent").stdout


def test_import_is_quick(installed, tmp_path):
    provider = write_provider(tmp_path / "provider", core_specs("sm90a"))
    environment = {"PYTHONPATH": installed, "PRECAST_PROVIDER_PATH": str(provider)}
    report = python("-X", "importtime", "-c", "import precast", **environment).stderr
    assert re.search(r"\| +precast\n", report)
    assert not re.search(r"\| +(torch|tvm_ffi)\n", report)
    # A third of what its modules of the standard library take, 20 ms on a slow machine: as a ratio,
    # because neither a slow machine nor a busy one changes that.
    code = """
from time import process_time as now
start = now()
import ctypes, hashlib, importlib.metadata, json, logging, pathlib, typing
middle = now()
import precast
print((now() - middle) / (middle - start))
"""
    assert min(float(python("-c", code, **environment).stdout) for _ in range(3)) < 1
