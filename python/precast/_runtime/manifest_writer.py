# SPDX-License-Identifier: Apache-2.0
"""Write ``manifest.json`` from the files of a provider, and refuse files that were not planned.

Everything in a row is read from the library itself, so a manifest cannot claim anything that the
build did not make. It contains nothing that differs between two builds; the build time of each
module is written to ``compile_seconds.json`` in the build tree::

    python -m precast._runtime.manifest_writer --profile core --archs "9.0a" --cuda 13 --root FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from precast._base.errors import ProviderError, ToolchainError
from precast._base.version import __version__
from precast._plan.places import checkout_root, write_if_different
from precast._plan.planner import Plan
from precast._plan.spec import ModuleSpec
from precast._runtime import elf
from precast._runtime.manifest import MANIFEST_NAME, Manifest, ModuleRow

#: Libraries of every Linux system that a module may need, besides cudart and tvm-ffi.
SYSTEM_LIBRARIES = (
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
)
TVM_FFI_LIBRARY = "libtvm_ffi.so"
SECONDS_NAME = "compile_seconds.json"


def write_manifest(
    root: Path,
    plan: Plan,
    specs: Sequence[ModuleSpec],
    *,
    distribution: str,
    toolkit: str,
) -> Manifest:
    """Describe the modules under ``root`` in ``root/manifest.json``.

    Parameters
    ----------
    root : Path
        The folder with ``<arch>/<module>.so``.
    specs : sequence of ModuleSpec
        The planned modules, all of one CUDA major.
    distribution : str
        The name of the distribution that will hold the modules.
    toolkit : str
        The full version of nvcc.

    Raises
    ------
    ProviderError
        If the modules differ from the plan: one is missing, one is not planned, or one has other
        machine code, exports or libraries. All problems are listed, and no manifest is written.
    """
    from precast._base import tvm_ffi as _tvm_ffi

    if not specs:
        raise ProviderError("nothing is planned: the profile or the targets are empty")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        checked = list(pool.map(lambda spec: _read_module(root, spec), specs))
    problems = [problem for _, found in checked for problem in found]
    problems += unplanned(root, (spec.file_name for spec in specs))
    if problems:
        raise ProviderError("\n".join([f"{root} is not what was planned:", *problems]))
    cuda = plan.build.cuda[specs[0].cuda_major]
    low, high = specs[0].tvm_ffi_range
    manifest = Manifest(
        distribution=distribution,
        version=__version__,
        cuda_major=cuda.major,
        toolkit=toolkit,
        min_driver=cuda.min_driver,
        machine=platform.machine(),
        tvm_ffi_built=_tvm_ffi.version(),
        tvm_ffi_min=low,
        tvm_ffi_max_exclusive=high,
        modules=tuple(row for row, _ in checked if row is not None),
    )
    write_if_different(root / MANIFEST_NAME, manifest.dump())
    return manifest


def unplanned(root: Path, planned: Iterable[str]) -> list[str]:
    """A line for each library under ``root`` that is not in ``planned``."""
    there = {path.relative_to(root).as_posix() for path in root.rglob("*.so")}
    return [f"  {name}: not planned" for name in sorted(there - set(planned))]


def _read_module(root: Path, spec: ModuleSpec) -> tuple[ModuleRow | None, list[str]]:
    """The manifest's row of one module, and the problems of its file."""
    path = root / spec.file_name
    if not path.is_file():
        return None, [f"  {spec.file_name}: missing"]
    data = path.read_bytes()
    try:
        symbols, code = elf.read_symbols(path), elf.read_machine_code(path)
    except ValueError as error:
        return None, [f"  {spec.file_name}: {error}"]
    row = ModuleRow(
        name=spec.name,
        arch=spec.arch.name,
        file=spec.file_name,
        fingerprint=spec.fingerprint,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        exports=symbols.exports,
        sass=code.sass,
        needed=symbols.needed,
    )
    problems = module_problems(symbols, code, spec.exports, spec.arch.sass, spec.cudart)
    return row, [f"  {spec.file_name}: {problem}" for problem in problems]


def module_problems(
    symbols: elf.Symbols,
    code: elf.MachineCode,
    exports: Sequence[str],
    sass: str,
    cudart: str,
) -> list[str]:
    """The differences between a library and its plan."""
    allowed = {*SYSTEM_LIBRARIES, TVM_FFI_LIBRARY, cudart}
    facts = [
        ("exports", sorted(symbols.exports), sorted(exports)),
        ("has machine code for", list(code.sass), [sass]),
        ("has PTX for", list(code.ptx), []),
        ("has other public symbols", list(symbols.private), []),
        ("has process-wide (GNU_UNIQUE) symbols", list(symbols.unique), []),
        ("has an RPATH", list(symbols.run_path), []),
        ("needs other libraries", [n for n in symbols.needed if n not in allowed], []),
    ]
    return [
        f"{what} {', '.join(got) or 'nothing'}; planned: {', '.join(wanted) or 'none'}"
        for what, got, wanted in facts
        if got != wanted
    ]


def ninja_seconds(log: Path) -> dict[str, float]:
    """Compile and link time of each module of a CMake build, from Ninja's own log."""
    seconds: dict[str, float] = {}
    if not log.is_file():
        return seconds
    latest: dict[str, float] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) == 5:
            start, end, _, output, _ = fields
            latest[output] = (int(end) - int(start)) / 1000
    for output, took in latest.items():
        parts = Path(output).parts
        if "CMakeFiles" in parts:  # CMakeFiles/<arch>-<module>.dir/...
            target = parts[parts.index("CMakeFiles") + 1].removesuffix(".dir")
            name = target.replace("-", "/", 1) + ".so"
        else:
            name = "/".join(parts[-2:])
        seconds[name] = seconds.get(name, 0.0) + took
    return seconds


def slowest(seconds: Mapping[str, float], count: int = 3) -> str:
    """A line with the modules that took the longest."""
    ranked = sorted(seconds.items(), key=lambda item: item[1], reverse=True)[:count]
    return "slowest: " + ", ".join(f"{name} {took:.1f} s" for name, took in ranked)


def main(argv: Sequence[str] | None = None) -> int:
    from precast._jit import cute_dsl
    from precast._jit.plan_files import target_archs
    from precast._jit.toolchain import find_toolkit

    parser = argparse.ArgumentParser(prog="python -m precast._runtime.manifest_writer")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--build", type=Path, help="the build tree, for compile times")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--archs", required=True)
    parser.add_argument("--cuda", type=int, required=True)
    parser.add_argument("--distribution", required=True)
    args = parser.parse_args(argv)
    source = checkout_root()
    assert source is not None, "CMake runs this in a checkout"
    plan = Plan.load(source)
    archs = target_archs(plan, args.archs)
    # CMake has said which modules it left out.
    specs, _ = cute_dsl.buildable(plan.modules(args.profile, archs, args.cuda))
    try:
        manifest = write_manifest(
            args.root,
            plan,
            specs,
            distribution=args.distribution,
            toolkit=find_toolkit(max(archs, key=lambda arch: arch.cuda), args.cuda).build,
        )
    except (ProviderError, ToolchainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(row.size for row in manifest.modules)
    print(f"{len(manifest.modules)} modules, {size / 1e6:.1f} MB: {args.root / MANIFEST_NAME}")
    if args.build is not None:
        seconds = ninja_seconds(args.build / ".ninja_log")
        took = {row.file: round(seconds.get(row.file, 0.0), 3) for row in manifest.modules}
        write_if_different(args.build / SECONDS_NAME, json.dumps(took, indent=1) + "\n")
        print(slowest(took))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
