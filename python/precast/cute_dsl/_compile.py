# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of one Python source to an object for the linker.

Each other file of this folder is a source of an op, named by its ``aot_configs/<op>.toml``: a class
for each kernel, and ``kernels()``, which says what a module is compiled from. Only a build imports
them, so the folder is no package: what goes through precast's modules does not find it.

Builds start this file by its path::

    python -I _compile.py --arch=sm_90a --version=4.8.1 --axis=dtype=bf16 --fatbinary=FILE
        SOURCE -o OBJECT -- g++ FLAGS...

The object has the machine code of each kernel, and for each a C++ function that launches it::

    cudaError_t precast::cute_dsl::<kernel>(uint32_t ctas, bool enable_pdl, cudaStream_t, ...);
    extern const int precast::cute_dsl::<kernel>_threads;
    extern const DType precast::cute_dsl::<kernel>_<axis>;  // int for an axis of numbers

The last arguments are those of the kernel, so that a binding which passes others is not linked. A
tensor map is ``const TensorMap&``: the binding encodes it. Why
machine code and not the object that CuTe DSL can export: that one calls a runtime library which
only the packages of CuTe DSL have (docs/decisions.md). Name, arguments and threads of a kernel are
read from its PTX, the text of which NVIDIA documents (PTX ISA, "Kernel Function Parameters" and
"Performance-Tuning Directives").
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import site
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

DISTRIBUTION = "nvidia-cutlass-dsl"
PACKAGE = "precast.cute_dsl"
#: What C++ calls a parameter, by its type in PTX.
_TYPES = {".f32": "float", ".f64": "double", ".u32": "int32_t", ".u64": "int64_t"}
_MAP = re.compile(r"\.param\s+\.align\s+64\s+\.b8\s+\S+\[128\]")  # the argument for a TMA copy
_ENTRY = re.compile(r"\.entry\s+(?P<name>\S+?)\((?P<parameters>.*?)\)(?P<rest>.*?)\{", re.DOTALL)
_THREADS = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*1)*\s*$", re.MULTILINE)


class Kernel(NamedTuple):
    """What is compiled of one kernel."""

    function: str  # its name in C++
    entry: str
    arguments: list[str]  # their types in C++
    threads: int
    code: bytes
    shared_bytes: int = 0  # of dynamic shared memory
    cluster: int = 1  # CTAs


def read_ptx(
    function: str, text: str, code: bytes, shared_bytes: int = 0, cluster: int = 1
) -> Kernel:
    """Read the entry of a kernel; raise ValueError if it cannot be launched by a module."""
    entries = [*_ENTRY.finditer(text)]
    if len(entries) != 1:
        raise ValueError(f"{function} has {len(entries)} kernels; legal: one for each name")
    found = entries[0]
    threads = _THREADS.search(found["rest"])
    if threads is None:
        raise ValueError(f"{function} must have a one-dimensional block of constant size")
    if bool(re.search(r"\.extern\s+\.shared", text)) != (shared_bytes > 0):
        raise ValueError(
            f"{function} must take dynamic shared memory if kernels() says how much, got "
            f"{shared_bytes} bytes. Fix: {{'shared_bytes': ...}} behind its arguments"
        )
    arguments = []
    for number, parameter in enumerate(filter(str.strip, found["parameters"].split(","))):
        words = parameter.split()
        kind = "const void*" if ".ptr" in words else _TYPES.get(words[1])
        if _MAP.fullmatch(parameter.strip()):
            kind = "const TensorMap&"
        if kind is None:
            raise ValueError(
                f"{function}: argument {number} is {parameter.strip()!r}; legal: cute.Pointer, "
                f"Int32, Int64, Float32, Float64, the atom of a TMA copy. Fix: pass the pointer "
                f"and the sizes of a tensor, and make the tensor in the kernel"
            )
        arguments.append(kind)
    return Kernel(function, found["name"], arguments, int(threads[1]), code, shared_bytes, cluster)


def compile_source(path: Path, axes: dict[str, str], arch: str) -> list[Kernel]:
    """Compile what ``kernels(**axes)`` of a source says."""
    import cuda.bindings.driver as driver
    import cutlass.cute as cute

    # Other files of the folder can be imported by their usual name; of precast nothing else exists.
    for name, folders in (("precast", []), (PACKAGE, [str(path.parent)])):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = folders
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    made = []
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch={arch} --keep-cubin --keep-ptx --dump-dir={folder}"
        for name, (kernel, arguments, *launch) in module.kernels(**axes).items():
            compiled: Any = cute.compile(kernel, *arguments, driver.CUstream(0), options=options)
            attributes = launch[0] if launch else {}
            made.append(read_ptx(name, compiled.__ptx__, compiled.__cubin__, **attributes))
    return made


def launchers(
    source: str, kernels: Iterable[Kernel], files: Iterable[Path], axes: Mapping[str, str]
) -> str:
    """C++ that holds the machine code of ``files``, and a function for each kernel."""
    lines = [f"// Written by the build from {source}.", '#include "core/cute_kernel.h"', ""]
    for kernel, file in zip(kernels, files):
        symbol = f"precast_code_of_{kernel.function}"
        assembler = "".join(
            f"{line}\\n"
            for line in (
                '.section .nv_fatbin, \\"a\\"',
                ".balign 16",
                f"{symbol}:",
                f'.incbin \\"{file}\\"',
                ".previous",
            )
        )
        taken = "".join(f", {kind} a{i}" for i, kind in enumerate(kernel.arguments))
        passed = "".join(f", a{i}" for i, _ in enumerate(kernel.arguments))
        lines += [
            f'__asm__("{assembler}");',
            f'extern "C" __attribute__((visibility("hidden"))) const unsigned char {symbol}[];',
            "namespace precast::cute_dsl {",
            f"extern const int {kernel.function}_threads = {kernel.threads};",
            *(_constant(f"{kernel.function}_{axis}", word) for axis, word in axes.items()),
            f"cudaError_t {kernel.function}(uint32_t ctas, bool enable_pdl, cudaStream_t stream"
            f"{taken}) {{",
            f'  static CuteKernel kernel({symbol}, "{kernel.entry}", {kernel.threads}, '
            f"{kernel.shared_bytes}, {kernel.cluster});",
            f"  return kernel.launch(ctas, enable_pdl, stream{passed});",
            "}",
            "}  // namespace precast::cute_dsl",
            "",
        ]
    return "\n".join(lines)


def _constant(name: str, word: str) -> str:
    kind, value = ("int", word) if word.isdecimal() else ("DType", f"DType::{word}")
    return f"extern const {kind} {name} = {value};"


def write_object(
    source: str,
    kernels: list[Kernel],
    axes: Mapping[str, str],
    arch: str,
    fatbinary: str,
    compiler: list[str],
    out: Path,
) -> None:
    """Pack the machine code as nvcc does, and compile the launchers."""
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder, files = Path(name), []
        for number, kernel in enumerate(kernels):
            cubin, packed = folder / f"{number}.cubin", folder / f"{number}.fatbin"
            cubin.write_bytes(kernel.code)
            image = f"--image3=kind=elf,sm={arch.removeprefix('sm_')},file={cubin}"
            subprocess.run(
                [fatbinary, "-64", "--compress-all", f"--create={packed}", image], check=True
            )
            files.append(packed)
        text = folder / "launchers.cc"
        text.write_text(launchers(source, kernels, files, axes), encoding="utf-8")
        hidden = f"-ffile-prefix-map={folder}=."
        subprocess.run([*compiler, hidden, "-c", str(text), "-o", str(out)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--axis", action="append", default=[])
    parser.add_argument("--fatbinary", required=True)
    parser.add_argument("--site", action="append", default=[])
    parser.add_argument("source", type=Path)
    parser.add_argument("-o", dest="out", type=Path, required=True)
    parser.add_argument("compiler", nargs="+")
    args = parser.parse_args()
    for folder in args.site:
        site.addsitedir(folder)
    # Its variables change what it compiles, and its cache would hold what another version made.
    for name in [name for name in os.environ if name.startswith("CUTE_DSL_")]:
        del os.environ[name]
    os.environ.update(CUTE_DSL_ARCH=args.arch, CUTE_DSL_NO_CACHE="1")
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    version = importlib.metadata.version(DISTRIBUTION)
    if version != args.version:
        raise SystemExit(f"error: {DISTRIBUTION} {version} is installed, not {args.version}")
    axes = dict(axis.split("=", 1) for axis in args.axis)
    try:
        kernels = compile_source(args.source, axes, args.arch)
    except ValueError as error:
        raise SystemExit(f"{args.source}: error: {error}") from error
    name = f"python/precast/cute_dsl/{args.source.name}"
    write_object(name, kernels, axes, args.arch, args.fatbinary, args.compiler, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
