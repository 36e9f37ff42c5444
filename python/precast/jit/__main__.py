# SPDX-License-Identifier: Apache-2.0
"""Write the plan for other tools.

::

    python -m precast.jit json  --out plan.json
    python -m precast.jit cmake --out plan.cmake --profile core --archs "9.0a" --cuda 13
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from precast.errors import ConfigError, UnsupportedConfigError
from precast.jit.planner import Plan, checkout_root, write_if_different
from precast.jit.spec import JitSpec


def cmake_rows(specs: Iterable[JitSpec]) -> str:
    """The plan as calls of the function ``precast_add_module`` that CMakeLists.txt defines."""
    lines = ["# Written by precast.jit.planner; do not edit."]
    for spec in specs:
        cuda = [s for s in spec.sources if s.endswith(".cu")]
        host = [s for s in spec.sources if not s.endswith(".cu")]
        fields = {
            "NAME": [spec.name],
            "ARCH": [spec.arch.name],
            "OP": [spec.op],
            "CUDA_SOURCES": cuda,
            "HOST_SOURCES": host,
            "CUDA_FLAGS": spec.compile_flags(".cu"),
            "HOST_FLAGS": spec.compile_flags(".cc"),
            "LINK_FLAGS": list(spec.link_flags),
            "VERSION_SCRIPT": [spec.version_script],
        }
        body = "".join(
            f"\n  {key} " + " ".join(f"[==[{value}]==]" for value in values)
            for key, values in fields.items()
        )
        lines.append(f"precast_add_module({body})")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m precast.jit", description=__doc__)
    parser.add_argument("form", choices=("json", "cmake"))
    parser.add_argument("--root", type=Path, default=checkout_root())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default=None)
    parser.add_argument("--archs", default=None)
    parser.add_argument("--cuda", type=int, default=13)
    args = parser.parse_args(argv)
    if args.root is None:
        parser.error("--root is needed outside a checkout")
    try:
        plan = Plan.load(args.root)
        if args.form == "json":
            text = json.dumps(plan.document, indent=None, separators=(",", ":"), sort_keys=True)
        else:
            archs = None if args.archs is None else plan.archs(args.archs)
            text = cmake_rows(plan.modules(args.profile, archs, args.cuda))
    except (ConfigError, UnsupportedConfigError, ValueError) as error:
        parser.exit(2, f"error: {error}{os.linesep}")
    write_if_different(args.out, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
