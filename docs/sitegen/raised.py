# SPDX-License-Identifier: Apache-2.0
"""Real messages of errors: every example raises its error.

Facts that differ from machine to machine (folders, compilers, GPUs, installed packages) are
replaced around the code that raises, never in the message.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from precast import errors
from precast._base import env as _env
from precast._plan.installed import plan
from precast._plan.places import SOURCE_FOLDERS
from sitegen import ROOT, markup

#: The message shows this folder instead of the temporary folder of an example.
HOME = "/home/you"

EXAMPLES: dict[str, Callable[[Path], object]] = {}


def example(name: str) -> str:
    """The message of one error of ``precast.errors``; empty if no example raises it."""
    known = name in EXAMPLES and hasattr(errors, name)
    return markup.fence("text", f"{name}: {message(name)}") if known else ""


def message(name: str) -> str:
    """Raise the error ``name`` and return its message."""
    kind = getattr(errors, name)
    with tempfile.TemporaryDirectory() as folder, _bare_environment(folder):
        try:
            EXAMPLES[name](Path(folder))
        except kind as error:
            if type(error) is not kind:
                raise
            return str(error).replace(folder, HOME)
    raise AssertionError(f"the example of {name} raised nothing")


@contextlib.contextmanager
def _bare_environment(folder: str) -> Iterator[None]:
    """Remove the settings of this machine, and set a cache directory for the example."""
    ours = {row.name for row in _env.REGISTRY} | {"CUDA_HOME", "CUDA_PATH", "CXX"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    with mock.patch.dict(os.environ, kept, clear=True):
        os.environ["PRECAST_CACHE_DIR"] = f"{folder}/.cache/precast"
        yield


def _raises(name: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    def register(function: Callable[[Path], object]) -> Callable[[Path], object]:
        EXAMPLES[name] = function
        return function

    return register


@_raises("ConfigError")
def _config(folder: Path) -> None:
    from precast._plan.config import load_config

    for part in SOURCE_FOLDERS:
        shutil.copytree(ROOT / part, folder / part)
    scale = folder / "aot_configs" / "scale.toml"
    scale.write_text(scale.read_text().replace('"f16", "bf16", "f32"', '"fp16", "bf16"', 1))
    load_config(folder)


@_raises("EnvironmentVariableError")
def _variable(folder: Path) -> None:
    os.environ["PRECAST_JIT"] = "never"
    _env.JIT()


@_raises("MissingJITCacheError")
def _missing_build(folder: Path) -> None:
    from precast.jit import gen_jit_spec

    source = folder / "my_kernel.cu"
    source.write_text("")
    os.environ["PRECAST_JIT"] = "error"
    gen_jit_spec("my_kernel", [source], arch="9.0a", cuda_major=13).build()


@_raises("MissingKernelError")
def _missing_kernel(folder: Path) -> None:
    from precast._runtime import jit_fallback, loader

    os.environ["PRECAST_JIT"] = "error"
    with (
        mock.patch.object(loader, "find_providers", list),
        mock.patch.object(jit_fallback, "jit_cuda_major", lambda plan, arch: 13),
        mock.patch.object(loader, "_device_capability", lambda device: "9.0"),
        mock.patch.object(loader, "_device_name", lambda device: "cuda:0 (NVIDIA H200)"),
    ):
        loader.Loader().load("norm", {"dtype": "bf16"}, 0)


@_raises("UnsupportedConfigError")
def _unsupported(folder: Path) -> None:
    plan().spec("norm", {"dtype": "f32"}, "9.0")


@_raises("UnsupportedTargetError")
def _unsupported_target(folder: Path) -> None:
    from precast._plan.planner import Plan

    for part in SOURCE_FOLDERS:
        shutil.copytree(ROOT / part, folder / part)
    norm = folder / "aot_configs" / "norm.toml"
    norm.write_text(re.sub(r"^archs = .*$", 'archs = ["sm90a"]', norm.read_text(), flags=re.M))
    Plan.load(folder).spec("norm", {"dtype": "bf16"}, "8.0")


@_raises("ToolchainError")
def _toolchain(folder: Path) -> None:
    from precast._jit import toolchain

    with (
        mock.patch.object(toolchain, "_system_homes", lambda: iter(())),
        mock.patch.object(toolchain, "_python_toolkit", lambda: None),
    ):
        toolchain.find_toolkit(plan().build.archs["sm90a"])


@_raises("CompileError")
def _compile(folder: Path) -> None:
    from precast._jit import compiler
    from precast._jit.commands import Command

    nvcc = folder / "cuda-12.1" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\necho \"nvcc fatal   : Unsupported gpu architecture 'compute_100f'\"\nexit 1\n"
    )
    nvcc.chmod(0o755)
    argv = [str(nvcc), "-O3", "-gencode=arch=compute_100f,code=sm_100f", "-c", "csrc/norm/norm.cu"]
    compiler.run([Command("cuda", argv, folder / "norm.cu.o")], folder, "norm__dtype_bf16")


@_raises("CacheDirectoryError")
def _cache(folder: Path) -> None:
    from precast._jit import env

    (folder / "cache").write_text("a file is in the way")
    os.environ["PRECAST_CACHE_DIR"] = str(folder / "cache")
    env.writable_cache_dir()


@_raises("LoadError")
def _load(folder: Path) -> None:
    from precast._runtime import library as libraries

    library = folder / "sm90a" / "norm__dtype_bf16.so"
    library.parent.mkdir()
    library.write_text("cut short")
    with mock.patch.object(libraries, "open_cudart", lambda *names: None):
        libraries.load_library(library, 13)


@_raises("ProviderError")
def _provider(folder: Path) -> None:
    from precast._runtime import aot

    extra = folder / "modules" / "sm80" / "old_op.so"
    extra.parent.mkdir(parents=True)
    extra.write_text("")
    with mock.patch.object(aot, "find_toolchain", lambda *args: None):
        spec = plan().spec("norm", {"dtype": "bf16"}, "9.0", 13)
        aot.build(plan(), [spec], folder / "modules")


@_raises("BundleError")
def _bundle(folder: Path) -> None:
    from precast.bundle import make_bundle, this_target

    (folder / "bundle").mkdir()
    (folder / "bundle" / "notes.txt").write_text("")
    make_bundle(folder / "bundle", ["sm90a"], this_target(), cuda_major=13, version="0.1.0")


@_raises("BackendSupportedError")
def _backend(folder: Path) -> None:
    from precast.decorators import backend_requirement

    @backend_requirement({"fa2": lambda q, backend: True})
    def attention(q: object, backend: str = "fa2") -> None:
        """Stands for an op that has backends to choose from."""

    attention(None, backend="fa3")


@_raises("DumpError")
def _dump(folder: Path) -> None:
    from precast.api_logging.replay import find_dumps

    find_dumps(folder)


@_raises("MissingPackageError")
def _missing_package(folder: Path) -> None:
    from precast.api_logging import _encoding

    with mock.patch.dict(sys.modules, {"safetensors": None}):
        _encoding.safetensors()


@_raises("OutputShapeError")
def _output_shape(folder: Path) -> None:
    import torch

    import precast

    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    with precast.reference_mode():
        precast.silu_and_mul(x, out=torch.empty_like(x))


@_raises("DtypeRuntimeError")
def _dtype(folder: Path) -> None:
    import torch

    import precast

    x, gemma, beta = torch.zeros(4, 256), torch.ones(256), torch.zeros(256)
    with precast.reference_mode():
        precast.layernorm(x, gemma, beta)


@_raises("PlanMismatchError")
def _plan_mismatch(folder: Path) -> None:
    import torch

    import precast

    with precast.reference_mode():
        wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8))
        one = torch.ones(1, dtype=torch.int32)
        wrapper.plan(torch.arange(2), one, one, 8, 8, 64, 1, window_left=127)
        q, cache = torch.zeros(1, 8, 64).half(), torch.zeros(2, 2, 1, 8, 64).half()
        wrapper.run(q, cache, window_left=1023)


@_raises("CacheLayoutError")
def _cache_layout(folder: Path) -> None:
    import torch

    import precast

    q, zero = torch.zeros(1, 8, 64), torch.zeros(1, dtype=torch.int64)
    pages, table = torch.zeros(4, 16, 8, 64), torch.zeros(1, 64)
    call = (q, q, None, None, q, table, zero, (pages, pages), zero, zero, zero, zero)
    with precast.reference_mode():
        precast.rope_quantize_fp8_append_paged_kv_cache(*call, kv_layout="NDH")
