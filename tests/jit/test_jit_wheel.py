# SPDX-License-Identifier: Apache-2.0
"""JIT from the installed wheel with the compiler of PyPI, and no toolkit on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from jit_support import PACKAGES, environment, in_namespace, run, write_tiny

#: Hides every toolkit of the machine: nvcc is taken off PATH by the caller.
HIDE = """
for toolkit in /usr/local/cuda*; do
  if [ -d "$toolkit" ] && ! [ -L "$toolkit" ]; then mount -t tmpfs none "$toolkit"; fi
done
"""

SCRIPT = """
import json, sys
import precast
from precast.jit import JitSpec, gen_jit_spec
from precast._jit.toolchain import find_toolchain
from precast._plan.installed import plan
from precast._runtime.library import get_function, load_library
folder = sys.argv[1]
tiny = gen_jit_spec("tiny", [f"{folder}/tiny.cu", f"{folder}/tiny_binding.cc"],
                    extra_include_paths=[f"{folder}/inc"], exports=["tiny_answer"], arch="9.0a")
spec = JitSpec.of(plan().spec("scale", {"dtype": "f32"}, "9.0"))
answer = tiny.build_and_load().get_function("tiny_answer")()
scale = get_function(spec.build_and_load(), "scale")
import torch
try:
    scale(torch.ones(4), 2.0, torch.empty(4), True)
    error = None
except ValueError as caught:
    error = str(caught)
print(json.dumps({"package": precast.__file__, "toolkit": str(find_toolchain().toolkit.nvcc),
                  "answer": answer, "error": error, "library": str(spec.get_library_path())}))
"""


def pip(*argv: object, timeout: float = 900) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, argv)]
    done = run(command, os.environ, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def python(toolchain, core, tmp_path_factory) -> Path:
    """An environment with ``precast[jit]`` from the wheel; torch is shared with this one."""
    home = tmp_path_factory.mktemp("venv") / "v"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    interpreter = home / "bin" / "python"
    site = Path(
        run(
            [str(interpreter), "-c", "import site; print(site.getsitepackages()[0])"], {}
        ).stdout.strip()
    )
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "shared.pth").write_text("\n".join(sorted(shared)) + "\n")
    pip("--python", interpreter, "install", "-q", "--force-reinstall", "--no-deps", core)
    pip("--python", interpreter, "install", "-q", f"precast[jit] @ file://{core}")
    return interpreter


@pytest.fixture
def env(tmp_path) -> dict[str, str]:
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(f for f in folders if not (Path(f) / "nvcc").exists())
    made = environment(PATH=path, PRECAST_CACHE_DIR=str(tmp_path / "cache"))
    del made["PYTHONPATH"]
    return made


def test_compile_load_and_call(python, env, tmp_path, mounts):
    tiny = write_tiny(tmp_path / "tiny")
    done = run(in_namespace(HIDE, [str(python), "-c", SCRIPT, str(tiny)]), env, cwd=str(tmp_path))
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    site = python.parents[1]
    assert Path(got["package"]).is_relative_to(site)
    assert not got["package"].startswith(PACKAGES)
    assert Path(got["toolkit"]).match("site-packages/nvidia/cu*/bin/nvcc")
    assert got["answer"] == 42
    assert got["error"] is not None
    assert "input must be a CUDA tensor" in got["error"]
    assert Path(got["library"]).is_relative_to(tmp_path / "cache")
    assert done.stderr.count("INFO: compiling ") == 2


def test_the_package_is_only_read(python, env, tmp_path, mounts):
    package = Path(
        run([str(python), "-c", "import precast; print(precast.__path__[0])"], env).stdout.strip()
    )
    before = {p: p.stat().st_mtime_ns for p in package.rglob("*") if "__pycache__" not in p.parts}
    tiny = write_tiny(tmp_path / "tiny")
    read_only = f"{HIDE}\nmount --bind {package} {package}; mount -o remount,ro,bind {package}"
    done = run(in_namespace(read_only, [str(python), "-c", SCRIPT, str(tiny)]), env, cwd="/")
    assert done.returncode == 0, done.stderr
    after = {p: p.stat().st_mtime_ns for p in package.rglob("*") if "__pycache__" not in p.parts}
    assert after == before


def test_without_any_compiler_the_message_names_what_to_install(python, env, tmp_path, mounts):
    tiny = write_tiny(tmp_path / "tiny")
    where = "import nvidia; print(*nvidia.__path__, sep='\\n')"
    folders = run([str(python), "-c", where], env).stdout.split()
    hide = HIDE + "".join(
        f"[ -d {f}/cu13/bin ] && mount -t tmpfs none {f}/cu13/bin || true\n" for f in folders
    )
    done = run(in_namespace(hide, [str(python), "-c", SCRIPT, str(tiny)]), env)
    assert done.returncode == 1
    assert "precast.errors.ToolchainError: no CUDA compiler for sm90a:" in done.stderr
    assert 'Fix: pip install "precast[jit]"' in done.stderr
    assert not (tmp_path / "cache").exists()
