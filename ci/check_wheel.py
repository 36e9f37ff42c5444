#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check built wheels before anyone installs them.

::

    python ci/check_wheel.py --profile core wheelhouse/*.whl

The core wheel must be pure Python and small, and have the plan of this checkout. A wheel of modules
is checked for its size, its manifest is compared with the plan, and every module with its manifest
row and the plan: hash, exports, libraries, machine code for its folder's target only, no PTX, and
no GLIBC newer than its tag.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "python"))
from precast._plan.places import SOURCE_FOLDERS  # noqa: E402
from precast._plan.planner import Plan  # noqa: E402
from precast._plan.spec import ModuleSpec  # noqa: E402
from precast._runtime import elf  # noqa: E402
from precast._runtime.manifest import MANIFEST_NAME, ModuleRow, read_manifest  # noqa: E402
from precast._runtime.manifest_writer import module_problems, unplanned  # noqa: E402

CORE_BYTES = 5 * 10**6
#: The budget of a wheel of one target in profile ``core``.
TARGET_BYTES = 60 * 10**6
MODULES_SOFT_BYTES = 250 * 10**6
MODULES_HARD_BYTES = 1 << 30
LIBSTDCXX = "libstdc++.so.6"


def check_wheel(
    wheel: Path, plan: Plan, profile: str, max_glibc: str = "", max_glibcxx: str = ""
) -> list[str]:
    """List the problems of a wheel."""
    name, _, *_, platform = wheel.stem.split("-")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        if name == "precast":
            return list(_core_problems(wheel, Path(folder), plan))
        limits = {"GLIBC": max_glibc or _glibc_of(platform), "GLIBCXX": max_glibcxx}
        root = Path(folder) / name
        return list(_modules_problems(wheel, root, plan, profile, limits))


def _core_problems(wheel: Path, folder: Path, plan: Plan) -> Iterator[str]:
    if not wheel.name.endswith("-py3-none-any.whl"):
        yield "the core must be py3-none-any"
    if wheel.stat().st_size > CORE_BYTES:
        yield f"{wheel.stat().st_size} bytes, the budget is {CORE_BYTES}"
    yield from (f"{path.relative_to(folder)}: compiled code" for path in folder.rglob("*.so"))
    shipped = folder / "precast" / "data" / "plan.json"
    if not shipped.is_file():
        yield "precast/data/plan.json is missing"
    elif json.loads(shipped.read_bytes()) != json.loads(json.dumps(plan.document)):
        yield "precast/data/plan.json is not the plan of this checkout"
    for part in SOURCE_FOLDERS:
        for source in sorted(p for p in (plan.root / part).rglob("*.[a-z]*") if p.is_file()):
            if source.suffix == ".pyc":
                continue
            copy = shipped.parent / source.relative_to(plan.root)
            if not copy.is_file() or copy.read_bytes() != source.read_bytes():
                yield f"{source.relative_to(plan.root)} is missing or differs"


def _modules_problems(
    wheel: Path, root: Path, plan: Plan, profile: str, limits: dict[str, str]
) -> Iterator[str]:
    if re.search(r"-py3-none-(many)?linux_\w+\.whl$", wheel.name) is None:
        yield "the tag must be py3-none-linux_<machine> or py3-none-manylinux_<version>_<machine>"
    size = wheel.stat().st_size
    if size > MODULES_HARD_BYTES:
        yield f"{size} bytes, the limit is {MODULES_HARD_BYTES}"
    elif size > MODULES_SOFT_BYTES:
        print(f"warning: {wheel.name}: {size} bytes, the budget is {MODULES_SOFT_BYTES}")
    try:
        manifest = read_manifest(root)
    except ValueError as error:
        yield str(error)
        return
    if not manifest.modules:
        yield f"{MANIFEST_NAME} lists no module"
    if not wheel.stem.endswith(manifest.machine):
        yield f"its modules are for {manifest.machine}, its tag names another machine"
    archs = plan.archs(manifest.archs)
    named = re.fullmatch(r"precast_jit_cache_cu(\d+)_(sm\w+)", root.name)
    if named is not None:
        archs = [plan.arch(named[2])]
        if profile == "core" and size > TARGET_BYTES:
            yield f"{size} bytes, the budget of one target is {TARGET_BYTES}"
        if manifest.cuda_major != int(named[1]):
            yield f"its modules are for CUDA {manifest.cuda_major}, its name has {named[1]}"
    planned = {s.file_name: s for s in plan.modules(profile, archs, manifest.cuda_major)}
    listed = {row.file: row for row in manifest.modules}
    yield from (
        f"{file}: planned for {profile}, but missing" for file in sorted(planned.keys() - listed)
    )
    yield from (f"{file}: not planned for {profile}" for file in sorted(listed.keys() - planned))
    yield from (line.strip() for line in unplanned(root, listed))
    for file in sorted(planned.keys() & listed):
        for problem in _module_problems(root / file, planned[file], listed[file], limits):
            yield f"{file}: {problem}"


def _module_problems(
    path: Path, spec: ModuleSpec, row: ModuleRow, limits: dict[str, str]
) -> Iterator[str]:
    if not path.is_file():
        yield "missing"
        return
    data = path.read_bytes()
    if (len(data), hashlib.sha256(data).hexdigest()) != (row.size, row.sha256):
        yield "size or sha256 is not that of the manifest"
    if row.fingerprint != spec.fingerprint:
        yield "its fingerprint is not that of this checkout: it was built from other sources"
    symbols, code = elf.read_symbols(path), elf.read_machine_code(path)
    yield from module_problems(symbols, code, spec.exports, spec.arch.sass, spec.cudart)
    if LIBSTDCXX not in symbols.needed:
        yield (
            f"does not need {LIBSTDCXX}, so it has a copy of it, a megabyte in every module: the "
            f"linker found no libstdc++.so, only libstdc++.a"
        )
    read = (symbols.exports, symbols.needed, code.sass)
    if read != (row.exports, row.needed, row.sass):
        yield "exports, needed or sass differ from the manifest"
    for family, limit in limits.items():
        got = symbols.versions.get(family, "0")
        if limit and _number(got) > _number(limit):
            yield f"needs {family}_{got}, the newest allowed is {limit}"


def _glibc_of(platform: str) -> str:
    match = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    return f"{match[1]}.{match[2]}" if match else ""


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check built wheels.")
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--profile", default="core", help="profile of the modules")
    parser.add_argument("--max-glibc", default="", help="default: the version in the manylinux tag")
    parser.add_argument("--max-glibcxx", default="")
    args = parser.parse_args(argv)
    plan = Plan.load(ROOT)
    failed = False
    for wheel in args.wheels:
        problems = check_wheel(wheel, plan, args.profile, args.max_glibc, args.max_glibcxx)
        failed = failed or bool(problems)
        verdict = "FAILED" if problems else "ok"
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB: {verdict}")
        for problem in problems:
            print(f"  {problem}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
