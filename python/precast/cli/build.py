# SPDX-License-Identifier: Apache-2.0
"""Compile modules ahead of time into a folder, by the commands that JIT uses.

    precast build --profile core --arch "8.0 9.0a 10.0f" --out-dir build/modules

The folder is then a provider: set PRECAST_KERNEL_DIR to it, or add it to PRECAST_PROVIDER_PATH. A
run that was interrupted continues where it stopped. `python -m precast.aot` is the same command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from precast.cli import _completers, _output
from precast.cli._output import UsageError

EXIT_CODES = (0, 1, 2, 3)
JSON = {
    "directory": "the folder, as a full path",
    "profile": "the profile that was built",
    "cuda_major": "the CUDA major of the modules",
    "dry_run": "true if nothing was compiled",
    "modules": "the modules: file, state (built; of a dry run also: to build), size in bytes and "
    "compile_seconds (both null in a dry run)",
    "left_out": "the files of modules whose kernels are in CuTe DSL, if this environment has no "
    "compiler for these",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_argument(
        "--profile", metavar="NAME", help="profile to build (default: PRECAST_PROFILE, else core)"
    )
    _completers.attach(action, _completers.profiles)
    action = parser.add_argument(
        "--arch",
        nargs="+",
        action="extend",
        metavar="CC",
        help="targets such as 8.0 9.0a (default: PRECAST_CUDA_ARCH_LIST, else the GPUs present)",
    )
    _completers.attach(action, _completers.targets)
    parser.add_argument(
        "--cuda", type=int, metavar="MAJOR", help="CUDA major (default: that of the toolkit found)"
    )
    parser.add_argument(
        "-o",
        "--out-dir",
        type=Path,
        default=Path("build/modules"),
        metavar="DIR",
        help="output folder (default: %(default)s)",
    )
    parser.add_argument(
        "-j",
        "--jobs",
        type=_jobs,
        metavar="N",
        help="parallel compilers (default: MAX_JOBS, else by cores and free memory)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be built")
    _output.add_json(parser)


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from precast._base import env as _env
    from precast._jit import cute_dsl
    from precast._jit.plan_files import target_archs
    from precast._jit.toolchain import find_toolchain
    from precast._plan.installed import plan
    from precast._runtime import aot
    from precast._runtime.manifest_writer import slowest

    try:
        archs = target_archs(plan(), " ".join(args.arch or ()) or _env.CUDA_ARCH_LIST())
    except ValueError as error:
        raise UsageError(str(error)) from None
    toolchain = find_toolchain(max(archs, key=lambda arch: arch.cuda), args.cuda)
    major = toolchain.toolkit.major
    profile = args.profile or _env.PROFILE()
    specs, left_out = cute_dsl.buildable(plan().modules(profile, archs, major))
    if left_out:
        print(f"warning: {cute_dsl.statement(left_out)}", file=sys.stderr)
    folder = args.out_dir.absolute()
    report = {
        "directory": str(folder),
        "profile": profile,
        "cuda_major": major,
        "dry_run": args.dry_run,
        "left_out": [spec.file_name for spec in left_out],
    }
    if args.dry_run:
        states = {
            spec.file_name: "built" if aot.is_built(spec, toolchain, folder) else "to build"
            for spec in specs
        }
        if args.json:
            rows = [
                {"file": name, "state": state, "size": None, "compile_seconds": None}
                for name, state in states.items()
            ]
            _output.print_json({**report, "modules": rows})
        else:
            _output.print_table(list(states.items()), ("module", "state"), indent=0)
        return 0
    manifest = aot.build(plan(), specs, folder, jobs=args.jobs)
    seconds = aot.compile_seconds(specs, folder)
    if args.json:
        built = [
            {
                "file": row.file,
                "state": "built",
                "size": row.size,
                "compile_seconds": seconds[row.file],
            }
            for row in manifest.modules
        ]
        _output.print_json({**report, "modules": built})
        return 0
    size = _output.human_size(sum(row.size for row in manifest.modules))
    print(f"{len(manifest.modules)} modules, {size}: {folder}")
    print(slowest(seconds))
    return 0
