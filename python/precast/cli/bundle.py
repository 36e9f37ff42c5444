# SPDX-License-Identifier: Apache-2.0
"""Make an offline bundle: a folder of wheels that installs without a network.

    precast bundle -o bundle --arch 9.0a --python 3.12 --find-links dist
    precast bundle -o bundle --arch "8.0 9.0a" --with-torch torch==2.11.0 --extra jit
    precast bundle -o bundle --arch 9.0a --shim vllm

The folder holds wheels/ (the core, prebuilt modules for each target, and their dependencies),
pinned constraints, SHA256SUMS, install.sh and a page that explains it. The target must have torch
already, unless --with-torch includes it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from precast._base.progress import spinner
from precast.cli import _completers, _output
from precast.shim import ENGINES, make_wheel

EXIT_CODES = (0, 2, 3)
JSON = {
    "directory": "the folder",
    "python": "the Python version of the target",
    "platform": "the wheel tag of the target",
    "requirements": "the requirements, as pip reads them",
    "assumed": "the requirement that the target must have already (torch), or null",
    "notes": "notes to print",
    "wheels": "name, version, file and size of each wheel",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="a new or empty folder"
    )
    action = parser.add_argument(
        "--arch", nargs="+", required=True, metavar="CC", help="targets such as 9.0a or sm90a"
    )
    _completers.attach(action, _completers.targets)
    parser.add_argument("--python", metavar="X.Y", help="Python of the target (default: this one)")
    parser.add_argument(
        "--platform",
        metavar="TAG",
        help="wheel tag of the target (default: manylinux_2_28 for this machine's architecture)",
    )
    action = parser.add_argument(
        "--cuda", type=int, metavar="MAJOR", help="CUDA major (default: newest)"
    )
    _completers.attach(action, _completers.cuda_majors)
    parser.add_argument(
        "--with-torch",
        nargs="?",
        const="torch",
        metavar="REQUIREMENT",
        help="include torch (gigabytes), such as torch==2.11.0",
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="use this wheel instead of fetching its project",
    )
    parser.add_argument(
        "--find-links",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of wheels; its precast wheels are used, and others if needed",
    )
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME", help="an extra of precast: jit"
    )
    parser.add_argument(
        "--shim",
        choices=[*ENGINES],
        help="include the package that stands in for this engine's FlashInfer (precast shim)",
    )
    parser.add_argument(
        "--no-index", action="store_true", help="fetch nothing; use --find-links and --wheel only"
    )
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from precast._base.version import __version__
    from precast._plan.installed import plan
    from precast.bundle import Target, Wheel, local_wheels, make_bundle, this_target

    try:
        archs = [arch.name for arch in plan().archs(" ".join(args.arch))]
    except ValueError as error:
        raise _output.UsageError(f"--arch: {error}") from None
    here = this_target()
    try:
        target = Target(args.python or here.python, args.platform or here.platform)
    except ValueError as error:
        raise _output.UsageError(str(error)) from None
    majors = list(plan().build.cuda)
    if args.cuda is not None and args.cuda not in majors:
        raise _output.UsageError(f"--cuda {args.cuda}: legal: {', '.join(map(str, majors))}")
    with spinner("making the bundle") as log, tempfile.TemporaryDirectory() as folder:
        made = make_bundle(
            args.output,
            archs,
            target,
            cuda_major=args.cuda or max(majors),
            version=__version__,
            local=local_wheels(args.wheel, [Path(p) for p in args.find_links if "://" not in p]),
            find_links=args.find_links,
            extras=args.extra,
            beside=[Wheel.read(make_wheel(Path(folder), args.shim))] if args.shim else [],
            with_torch=args.with_torch,
            no_index=args.no_index,
            log=log,
        )
    if args.json:
        _output.print_json(made.as_json())
        return 0
    sizes = [wheel.path.stat().st_size for wheel in made.wheels]
    _output.print_table(
        [(w.name, w.version, _output.human_size(n)) for w, n in zip(made.wheels, sizes)],
        ("wheel", "version", "size"),
    )
    for note in made.notes:
        print(f"Note: {note}")
    if made.assumed is not None:
        print(f"{made.assumed} is not in the bundle: it must be installed on the target.")
    print(f"{made.folder}: {len(sizes)} wheels, {_output.human_size(sum(sizes))}")
    print(f"Install on the target: {made.folder.name}/install.sh")
    return 0
