#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the project of a distribution with the modules of one CUDA major and one target.

::

    python ci/make_provider.py --cuda 13 --arch sm90a -o build/providers/cu13-sm90a
    pip wheel --no-deps build/providers/cu13-sm90a

The project of ``python/precast_jit_cache`` is the template: the name of a distribution is static,
so each needs a ``pyproject.toml`` of its own. Import packages differ, so they live side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "python" / "precast_jit_cache"

sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "python")]
import images  # noqa: E402

from precast._base.names import provider_name  # noqa: E402
from precast._jit import cute_dsl  # noqa: E402
from precast._plan.planner import Plan  # noqa: E402
from precast.errors import UnsupportedConfigError  # noqa: E402


def make_provider(cuda: int, arch: str, folder: Path) -> str:
    """Write the project into ``folder``; return the name of its distribution.

    Raises
    ------
    ValueError
        If the CUDA major or the target is not in ``aot_configs/build.toml``.
    """
    plan = Plan.load(ROOT)
    plan.common(cuda)  # UnsupportedConfigError for an unknown major
    target = plan.arch(arch)
    if target.cuda[0] > cuda:
        raise ValueError(f"{target.name} needs CUDA >= {target.cuda[0]}.{target.cuda[1]}")
    name = provider_name(cuda, target.name)
    package = name.replace("-", "_")
    replacements = {
        '"precast-jit-cache"': json.dumps(name),
        '"precast_jit_cache"': json.dumps(package),
        "precast_jit_cache = ": f"{package} = ",
        'description = "': f'description = "CUDA {cuda}, {target.name}: ',
        # Relative, because cibuildwheel copies the checkout to another place.
        'source-dir = "../.."': f"source-dir = {json.dumps(os.path.relpath(ROOT, folder))}",
        'path = "."': f"path = {json.dumps(os.path.relpath(TEMPLATE, folder))}",
        '"precast_metadata:Modules" }': f'"precast_metadata:Modules" }}\ncuda = {cuda}',
        '{ env = "PRECAST_CUDA", default = "" }': json.dumps(str(cuda)),
        '{ env = "PRECAST_CUDA_ARCH_LIST", default = "" }': json.dumps(target.target),
        "install_cuda.sh MAJOR": f"install_cuda.sh {cuda}",
    }
    # Kernels in CuTe DSL, as only some targets have: see docs/decisions.md.
    compilers = {
        cute_dsl.requirement(spec)
        for spec in plan.modules(None, [target], cuda)
        if spec.is_cute_dsl
    }
    if compilers:
        last = '"pyelftools>=0.31",'
        replacements[last] = "\n  ".join([last, *(f"{json.dumps(c)}," for c in sorted(compilers))])
    for machine in images.machines():
        digest = json.dumps(images.reference(f"manylinux.{machine}"))
        key = f"manylinux-{machine}-image = "
        replacements[f'{key}"manylinux_2_28"'] = f"{key}{digest}"
    text = (TEMPLATE / "pyproject.toml").read_text(encoding="utf-8")
    for old, new in replacements.items():
        if old not in text:
            raise AssertionError(f"{TEMPLATE}/pyproject.toml no longer has the text {old}")
        text = text.replace(old, new)
    (folder / package).mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    init = TEMPLATE / "precast_jit_cache" / "__init__.py"
    shutil.copyfile(init, folder / package / "__init__.py")
    shutil.copyfile(TEMPLATE / "LICENSE", folder / "LICENSE")
    return name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a per-target provider project.")
    parser.add_argument("--cuda", type=int, required=True, help="CUDA major, such as 13")
    parser.add_argument("--arch", required=True, help="target, such as sm90a")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args(argv)
    try:
        print(make_provider(args.cuda, args.arch, args.out))
    except (UnsupportedConfigError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
