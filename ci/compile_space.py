#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile what ``aot_configs/`` declares, to find configurations that the compiler refuses.

::

    python ci/compile_space.py --sample 1            # one configuration of each op, any target
    python ci/compile_space.py --arch sm90a          # the whole space for one target
    python ci/compile_space.py --op attention        # the whole space of one op

The ``*.cu`` files, and the ``*.py`` files where CuTe DSL is installed, are compiled by the commands
of JIT; nothing is linked. Exits with 1 if a compile fails, and prints the first errors of each.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "python"))
from precast._jit import compiler, cute_dsl  # noqa: E402
from precast._jit.commands import build_commands  # noqa: E402
from precast._jit.jobs import max_jobs  # noqa: E402
from precast._jit.ptxas_gate import OPTION  # noqa: E402
from precast._jit.toolchain import Toolchain, find_toolchain  # noqa: E402
from precast._plan.planner import Plan  # noqa: E402
from precast._plan.spec import ModuleSpec  # noqa: E402
from precast.errors import CompileError  # noqa: E402


def declared(
    plan: Plan, toolchain: Toolchain, ops: Iterable[str] = (), archs: Iterable[str] = ()
) -> dict[str, list[ModuleSpec]]:
    """Every module that may exist, by op: what is prebuilt and what only JIT builds.

    Targets that the toolkit cannot compile for are left out. Empty ``ops`` and ``archs`` mean all.
    """
    targets = list(plan.build.archs.values())
    wanted = plan.archs(archs) or targets
    found: dict[str, list[ModuleSpec]] = {}
    for op in list(ops) or list(plan.config.ops):
        config = plan.config.op(op)
        found[op] = [
            plan.spec(op, axes, arch, toolchain.toolkit.major)
            for arch in wanted
            if arch.name in config.archs and arch.cuda <= toolchain.toolkit.version
            for axes in config.space.points()
        ]
    return found


def sampled(space: dict[str, list[ModuleSpec]], each: int, seed: int) -> list[ModuleSpec]:
    """``each`` modules of every op, the same for the same seed."""
    chosen = random.Random(seed)
    return [
        spec for specs in space.values() for spec in chosen.sample(specs, min(each, len(specs)))
    ]


def refused(
    specs: Sequence[ModuleSpec],
    toolchain: Toolchain,
    jobs: int | None = None,
    flags: Sequence[str] = (),
) -> dict[str, str]:
    """The modules that do not compile, by file name, with the first lines of the errors.

    ``flags`` come after those of JIT. Where notes of ptxas are errors they are left out, because
    code that is optimised less has some.
    """
    with ThreadPoolExecutor(jobs or max_jobs()) as pool:
        errors = list(pool.map(lambda spec: _compile(spec, toolchain, flags), specs))
    return {spec.file_name: error for spec, error in zip(specs, errors) if error}


def _compile(spec: ModuleSpec, toolchain: Toolchain, flags: Sequence[str]) -> str:
    """What JIT would say of the first error, or nothing."""
    start = time.monotonic()
    error = ""
    left_out = cute_dsl.problem(spec)
    with tempfile.TemporaryDirectory() as folder:
        for command in build_commands(spec, toolchain, Path(folder)):
            if command.kind in ("cuda", "cute_dsl") and not (error or left_out):
                has_none = command.kind != "cuda" or any(OPTION in word for word in command.argv)
                command = command._replace(argv=[*command.argv, *(() if has_none else flags)])
                try:
                    compiler.run([command], Path(folder), spec.file_name)
                except CompileError as failure:
                    error = str(failure)
    verdict = "refused" if error else "left out" if left_out else "ok"
    print(f"{verdict:9}{time.monotonic() - start:6.1f} s  {spec.file_name}", flush=True)
    return error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile what aot_configs/ declares.")
    parser.add_argument("--op", action="append", default=[], help="only this op (default: all)")
    parser.add_argument("--arch", action="append", default=[], help="only this target")
    parser.add_argument("--sample", type=int, metavar="N", help="only N configurations of an op")
    parser.add_argument("--seed", type=int, help="of the sample (default: a random one)")
    parser.add_argument("-j", "--jobs", type=int, help="compilers at once")
    args = parser.parse_args(argv)
    toolchain = find_toolchain()
    try:
        space = declared(Plan.load(ROOT), toolchain, args.op, args.arch)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    specs = [spec for specs in space.values() for spec in specs]
    if args.sample is not None:
        seed = random.randrange(1 << 32) if args.seed is None else args.seed
        print(f"--seed {seed}")
        specs = sampled(space, args.sample, seed)
    errors = refused(specs, toolchain, args.jobs)
    for name, text in errors.items():
        print(f"\nerror: {name} is declared and does not compile:\n{text}", file=sys.stderr)
    print(f"{len(specs) - len(errors)} of {len(specs)} configurations compile")
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
