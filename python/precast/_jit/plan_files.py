# SPDX-License-Identifier: Apache-2.0
"""Write the plan for other tools.

::

    python -m precast.jit json      --out plan.json
    python -m precast.jit toolchain --out toolchain.cmake --view view --archs "9.0a"
    python -m precast.jit cmake     --out plan.cmake --profile core --archs "9.0a" --cuda 13

If ``--archs`` is empty, the targets are those of the GPUs present; without a GPU that is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from precast._base.driver import device_capabilities
from precast._base.errors import ConfigError, ToolchainError, UnsupportedConfigError
from precast._jit import cute_dsl
from precast._jit.commands import location_flags
from precast._jit.hermetic import PASSED_VARIABLES, launcher
from precast._jit.jobs import max_jobs
from precast._jit.toolchain import Toolchain, find_toolchain, view_directory
from precast._plan.config import Arch
from precast._plan.places import checkout_root, write_if_different
from precast._plan.planner import Plan
from precast._plan.spec import ModuleSpec


def cmake_rows(specs: Iterable[ModuleSpec]) -> str:
    """The plan as calls of the function ``precast_add_module`` that CMakeLists.txt defines."""
    lines = ["# Written by python -m precast.jit; do not edit."]
    for spec in specs:
        cuda = [s for s in spec.sources if s.endswith(".cu")]
        host = [s for s in spec.sources if s.endswith(".cc")]
        python = [s for s in spec.sources if s.endswith(".py")]
        fields = {
            "NAME": [spec.name],
            "ARCH": [spec.arch.name],
            "OP": [spec.op],
            "CUDA_SOURCES": cuda,
            "HOST_SOURCES": host,
            "PYTHON_SOURCES": python,
            "CUDA_FLAGS": spec.compile_flags(".cu"),
            "HOST_FLAGS": spec.compile_flags(".cc"),
            "PYTHON_FLAGS": spec.compile_flags(".py") if python else [],
            "PYTHON_FILES": sorted(map(str, spec.files())) if python else [],
            "LINK_FLAGS": list(spec.link_flags),
            "VERSION_SCRIPT": [spec.version_script],
            "CUDA_LOCATIONS": location_flags(spec, ".cu"),
            "HOST_LOCATIONS": location_flags(spec, ".cc"),
        }
        body = "".join(f"\n  {key} {_quoted(values)}" for key, values in fields.items())
        lines.append(f"precast_add_module({body})")
    return "\n".join(lines) + "\n"


def cmake_toolchain(
    root: Path, toolchain: Toolchain, view: Path, archs: Iterable[Arch], script: Path
) -> str:
    """The toolchain as variables, so that CMake does not search for one."""
    fields = {
        "PRECAST_CUDA_MAJOR": [str(toolchain.toolkit.major)],
        "PRECAST_TARGETS": [" ".join(arch.target for arch in archs)],
        "PRECAST_CUDA_VIEW": [str(view)],
        "PRECAST_NVCC_COMMAND": toolchain.nvcc_command(),
        "PRECAST_CUTE_DSL_COMMAND": cute_dsl.command(root),
        "PRECAST_FATBINARY": [str(toolchain.fatbinary)],
        "PRECAST_HOST_COMPILER": [str(toolchain.host_compiler)],
        "PRECAST_CUDA_INCLUDE_FLAGS": toolchain.include_flags(cuda=True),
        "PRECAST_HOST_INCLUDE_FLAGS": toolchain.include_flags(cuda=False),
        "PRECAST_LIBRARIES": toolchain.libraries,
        "PRECAST_LAUNCHER": [str(script)],
        "PRECAST_PASSED_VARIABLES": PASSED_VARIABLES,
        "PRECAST_JOBS": [str(max_jobs())],
    }
    lines = ["# Written by python -m precast.jit; do not edit."]
    lines += [f"set({name} {_quoted(values)})" for name, values in fields.items()]
    return "\n".join(lines) + "\n"


def _quoted(values: Iterable[str]) -> str:
    return " ".join(f"[==[{value}]==]" for value in values)


def target_archs(plan: Plan, text: str | None) -> list[Arch]:
    """The targets that ``text`` lists, or those of the GPUs present if it is empty or None.

    Raises
    ------
    ValueError
        If an entry is no target, or nothing is listed and there is no GPU.
    """
    archs = plan.archs(text or device_capabilities())
    if not archs:
        raise ValueError(
            "no targets to build for: none is listed, and this machine has no GPU. Fix: set "
            'PRECAST_CUDA_ARCH_LIST, for example PRECAST_CUDA_ARCH_LIST="8.0 9.0a"; legal: '
            + ", ".join(arch.target for arch in plan.build.archs.values())
        )
    return archs


def _check_places(root: Path, build: Path) -> None:
    """Raise ValueError for a folder whose name a shell, CMake or nvcc would change."""
    places = (("checkout", root), ("build folder", build))
    # nvcc follows links to its source, and gives the shell what it finds.
    for what, place in [(w, p) for w, path in places for p in (path, path.resolve())]:
        changed = sorted(set("'\",;$`\\\n") & set(str(place)))
        if changed:
            raise ValueError(
                f"the name of the {what}, {place}, has {' '.join(map(repr, changed))}, which a "
                f"shell, CMake or nvcc would change. Fix: move it"
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m precast.jit", description=__doc__)
    parser.add_argument("form", choices=("json", "toolchain", "cmake"))
    parser.add_argument("--root", type=Path, default=checkout_root())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default=None)
    parser.add_argument("--archs", default=None)
    parser.add_argument("--cuda", type=int, default=None)
    parser.add_argument("--view", type=Path)
    args = parser.parse_args(argv)
    if args.root is None:
        parser.error("--root is needed outside a checkout")
    try:
        plan = Plan.load(args.root)
        if args.form == "json":
            # Not sorted: names of modules and keys of calls have the axes in this order.
            text = json.dumps(plan.document, indent=None, separators=(",", ":"))
        elif args.form == "toolchain":
            if args.view is None:
                parser.error("--view is needed")
            _check_places(args.root.absolute(), args.out.absolute().parent)
            archs = target_archs(plan, args.archs)
            toolchain = find_toolchain(max(archs, key=lambda arch: arch.cuda), args.cuda)
            view = view_directory(toolchain.toolkit, args.view)
            script = args.out.with_name("launcher.sh")
            write_if_different(script, launcher())
            text = cmake_toolchain(plan.root, toolchain, view, archs, script)
        else:
            targets = None if args.archs is None else target_archs(plan, args.archs)
            kept, left_out = cute_dsl.buildable(plan.modules(args.profile, targets, args.cuda))
            if left_out:
                print(f"warning: {cute_dsl.statement(left_out)}", file=sys.stderr)
            text = cmake_rows(kept)
    except (ConfigError, ToolchainError, UnsupportedConfigError, ValueError) as error:
        parser.exit(2, f"error: {error}{os.linesep}")
    write_if_different(args.out, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
