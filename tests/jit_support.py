# SPDX-License-Identifier: Apache-2.0
"""For the JIT layer: a tiny kernel, a worker process that builds it, and a quick fake toolkit."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import precast
from precast._jit.toolchain import Toolchain

PACKAGES = str(Path(precast.__file__).resolve().parents[1])
CONFIGURED = ("PRECAST_", "CUDA_", "CXX", "MAX_JOBS", "XDG_CACHE_HOME", "PYTHONPATH")

#: Builds ``tiny`` from the folder in its first argument and prints where it is. The kernel is from
#: outside the library, so nothing but the machinery of precast takes part.
WORKER = """
import logging, signal, sys
from precast.jit import gen_jit_spec
# Where the tests run in the background, the shell has Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
folder, *flags = sys.argv[1:]
spec = gen_jit_spec("tiny", [f"{folder}/tiny.cu", f"{folder}/tiny_binding.cc"],
                    extra_include_paths=[f"{folder}/inc"], exports=["tiny_answer"], arch="9.0a")
print(spec.build("this is a test"), flush=True)
if "load" in flags:
    print(spec.load().get_function("tiny_answer")(), flush=True)
"""

TINY_CU = """
#include <tiny.h>
__global__ void TinyKernel(int* out) { *out = TINY_NUMBER; }
cudaError_t launch_tiny(int* out) { TinyKernel<<<1, 1>>>(out); return cudaGetLastError(); }
"""

#: What the macro of tvm-ffi does, whose C++ headers take most of the time; ``ONE_FILE`` has them.
TINY_BINDING = """
#include <cuda_runtime_api.h>
#include <tiny.h>
#include <tvm/ffi/c_api.h>
cudaError_t launch_tiny(int* out);
// volatile: the compiler knows that a function has an address, and would drop the reference.
static cudaError_t (*volatile launch)(int*) = launch_tiny;
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_tiny_answer(void*, const TVMFFIAny*, int32_t,
                                                        TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = launch == nullptr ? 0 : TINY_NUMBER;
  return 0;
}
"""

#: A kernel and its export in one file.
ONE_FILE = """
#include <tvm/ffi/function.h>
__global__ void MineKernel(int* out) { *out = 1; }
static int mine(int x) { return x + (MineKernel != nullptr ? 1 : 0); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mine, mine);
"""


def write_tiny(folder: Path) -> Path:
    (folder / "inc").mkdir(parents=True)
    (folder / "inc" / "tiny.h").write_text("#pragma once\n#define TINY_NUMBER 42\n")
    (folder / "tiny.cu").write_text(TINY_CU)
    (folder / "tiny_binding.cc").write_text(TINY_BINDING)
    return folder


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without any setting of precast or of a compiler."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(CONFIGURED)}
    return {**env, "PYTHONPATH": PACKAGES, "PYTHONUNBUFFERED": "1", **changes}


def worker_command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-c", WORKER, str(folder), *flags]


def run(
    argv: Sequence[str], env: Mapping[str, str], timeout: float = 120, cwd: str = "/"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(argv), capture_output=True, text=True, env=env, timeout=timeout, cwd=cwd, check=False
    )


def success(done: subprocess.CompletedProcess[str]) -> Path:
    """The library that a worker built."""
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[0])


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """The last exception of a worker that failed with one, never by a signal."""
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("precast.errors."))
    return "\n".join(lines[last:])


def compiles(done: subprocess.CompletedProcess[str]) -> int:
    return done.stderr.count("INFO: compiling tiny for sm90a with nvcc")


def namespace() -> list[str] | None:
    """The command that starts another with mounts of its own, or None where that is forbidden."""
    for command in (["unshare", "-m"], ["unshare", "-r", "-m"]):
        if shutil.which("unshare") and run([*command, "true"], os.environ).returncode == 0:
            probe = [*command, "mount", "-t", "tmpfs", "none", "/mnt"]
            if run(probe, os.environ).returncode == 0:
                return command
    return None


def in_namespace(setup: str, argv: Sequence[str]) -> list[str]:
    """``argv`` after the shell lines ``setup``, whose mounts nobody else sees."""
    command = namespace()
    assert command is not None
    return [*command, "sh", "-e", "-c", f"{setup}\nexec {shlex.join(argv)}"]


# -- a toolkit that takes no time ------------------------------------------------------------------

_COMPILER = """#!/bin/sh
[ "$1" = --version ] && {{ echo "{version}"; exit 0; }}
for argument; do
  [ "$previous" = -o ] && output=$argument
  previous=$argument
done
. {settings}
echo "{name} $$" >> "$COMPILE_LOG"
case "$output" in *.so) product={library};; *) product={object};; esac
# In pieces, so that a kill can fall between them.
for piece in 1 2 3; do
  head -c $((${{piece}}0000)) "$product" > "$output"
  sleep "$COMPILE_SECONDS"
done
cp "$product" "$output"
"""


def fake_toolkit(folder: Path, real: Toolchain) -> dict[str, str]:
    """Compilers that copy a finished object slowly; the environment that selects them."""
    folder.mkdir()
    source = folder / "product.cc"
    source.write_text(
        'extern "C" int tiny_product() { static char pad[40000] = {1}; return pad[0] + 41; }'
    )
    thing, library = folder / "product.o", folder / "product.so"
    host = str(real.host_compiler)
    subprocess.run([host, "-fPIC", "-c", str(source), "-o", str(thing)], check=True)
    subprocess.run([host, "-shared", str(thing), "-o", str(library)], check=True)
    home = folder / "cuda"
    programs = {
        home / "bin" / "nvcc": "Cuda compilation tools, release 13.0, V13.0.1",
        folder / "g++": "g++ (Fake) 12.0",
    }
    for path, version in programs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            _COMPILER.format(
                version=version,
                name=path.name,
                object=thing,
                library=library,
                settings=folder / "settings",
            )
        )
        path.chmod(0o755)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13000\n")
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart.so.13").touch()
    env = {"PRECAST_CUDA_HOME": str(home), "CXX": str(folder / "g++")}
    return taking(env, 0.03)


def taking(env: dict[str, str], seconds: float, log: object = None) -> dict[str, str]:
    """``env`` of a fake toolkit, whose compilers from now on take three times ``seconds``."""
    folder = Path(env["CXX"]).parent
    (folder / "settings").write_text(
        f"COMPILE_SECONDS={seconds}\nCOMPILE_LOG={log or folder / 'log'}\n"
    )
    return env
