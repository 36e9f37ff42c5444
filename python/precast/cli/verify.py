# SPDX-License-Identifier: Apache-2.0
"""Verify the installed prebuilt modules against their manifests and the plan of this precast.

    precast verify
    precast verify --strict build/modules

It checks of every module: size and sha256, in the manifest and in pip's RECORD, the fingerprint
(whether it was built from exactly this core's sources), the exported functions, the libraries that
it needs, and its machine code. Exits with 1 if anything differs, or if there is nothing to verify.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast._base.progress import steps
from precast._plan.install_hint import FROM_A_FOLDER
from precast.cli import _output

if TYPE_CHECKING:
    from precast._runtime.manifest import ModuleRow
    from precast._runtime.providers import Provider

EXIT_CODES = (0, 1, 2, 3)
JSON = {
    "ok": "true if nothing differs and there is something to verify",
    "not_checked": "texts: checks that could not run here, and the tool that they need",
    "providers": "label, root, number of modules and problems (file, problem) of each",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        type=Path,
        nargs="*",
        metavar="DIR",
        help="folders with a manifest.json (default: all that are installed or configured)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail also if the tool for a check is missing"
    )
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    readers, skipped = _readers()
    providers = _providers(args.folders)
    total = sum(len(p.manifest.modules) for p in providers if p.manifest is not None)
    with steps("verifying", total) as done:
        reports = [_verify(provider, readers, done) for provider in providers]
    ok = bool(reports) and all(not r["problems"] for r in reports) and not (args.strict and skipped)
    if args.json:
        _output.print_json({"ok": ok, "not_checked": skipped, "providers": reports})
        return 0 if ok else 1
    for report in reports:
        bad = len({problem["file"] for problem in report["problems"]})
        verdict = f", {bad} of them with problems" if bad else " OK"
        count = f"{report['modules']} modules{verdict}"
        _output.print_heading(f"{report['label']} ({report['root']}): {count}")
        _output.print_table([(p["file"], "problem", p["problem"]) for p in report["problems"]])
    for text in skipped:
        print(f"Not checked: {text}")
    if not reports:
        print(
            f"no prebuilt modules are installed. Fix: precast install; with wheels in a folder: "
            f"{FROM_A_FOLDER}"
        )
    return 0 if ok else 1


def _providers(folders: list[Path]) -> list[Provider]:
    from precast._runtime.loader import loader
    from precast._runtime.manifest import read_manifest
    from precast._runtime.providers import Provider

    if not folders:
        return list(loader.providers)
    found = []
    for folder in folders:
        root = folder.absolute()
        try:
            found.append(Provider("folder", root, read_manifest(root), None))
        except ValueError as error:
            found.append(Provider("folder", root, None, str(error)))
    return found


def _verify(
    provider: Provider, readers: dict[str, Any], done: Callable[[], None]
) -> dict[str, Any]:
    problems = []
    rows = () if provider.manifest is None else provider.manifest.modules
    if provider.manifest is None:
        problems.append({"file": "manifest.json", "problem": str(provider.problem)})
    for row in rows:
        for problem in _module_problems(provider, row, readers):
            problems.append({"file": row.file, "problem": problem})
        done()
    problems += [{"file": f, "problem": text} for f, text in _record_problems(provider)]
    listed = {row.file for row in rows}
    for path in sorted(provider.root.glob("*/*.so")):
        name = path.relative_to(provider.root).as_posix()
        if name not in listed:
            problems.append({"file": name, "problem": "is not in the manifest"})
    return {
        "label": provider.label,
        "root": str(provider.root),
        "modules": len(rows),
        "problems": problems,
    }


def _record_problems(provider: Provider) -> Iterator[tuple[str, str]]:
    """Where the files of an installed provider differ from what pip recorded of its wheel."""
    import importlib.metadata

    from precast._base.files import read_regular
    from precast._base.trust import record_digest

    if provider.source != "provider" or provider.manifest is None:
        return
    try:
        files = importlib.metadata.files(provider.manifest.distribution) or ()
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return
    for file in files:
        path = Path(str(file.locate()))
        if file.hash is None or file.hash.mode != "sha256" or provider.root not in path.parents:
            continue
        try:
            is_same = record_digest(read_regular(path)[0]) == file.hash.value
            problem = "" if is_same else "is not what pip's RECORD says"
        except OSError:
            problem = "is in pip's RECORD and missing"
        if problem:
            name = path.relative_to(provider.root).as_posix()
            fix_hint = provider.fix_hint(provider.manifest.distribution)
            yield name, f"{problem}. Fix: {fix_hint}"


def _module_problems(provider: Provider, row: ModuleRow, readers: dict[str, Any]) -> Iterator[str]:
    from precast._base.trust import check_contents, trust_problem
    from precast._base.version import __version__
    from precast._runtime.loader import loader
    from precast._runtime.manifest import MANIFEST_NAME

    manifest = provider.manifest
    assert manifest is not None
    path = provider.root / row.file
    fix_hint = provider.fix_hint(manifest.distribution)
    problem = check_contents(path, row.size, row.sha256, fix_hint, row.exports)
    if problem is not None:
        yield problem
        return
    problem = trust_problem(path, provider.root / MANIFEST_NAME, must_be_own=False)
    if problem is not None:
        yield problem
    document = loader.document
    planned = document["modules"].get(row.name, {}).get("fingerprints", {})
    wanted = planned.get(f"cu{manifest.cuda_major}", {}).get(row.arch)
    if wanted is None:
        yield f"precast {__version__} does not plan {row.name} for {row.arch}: never loaded"
    elif wanted != row.fingerprint:
        yield (
            f"fingerprint {row.fingerprint[:12]} is not the {wanted[:12]} of precast {__version__} "
            f"(built from other sources): never loaded"
        )
    try:
        yield from _contents(path, row, readers)
    except ValueError as error:
        yield str(error)


def _contents(path: Path, row: ModuleRow, readers: dict[str, Any]) -> Iterator[str]:
    from precast._plan.installed import plan

    if "elf" in readers:
        symbols, prefix = readers["elf"](path), readers["prefix"]
        exported = [n[len(prefix) :] for n in symbols.defined if n.startswith(prefix)]
        op = plan().config.ops.get(row.name.partition("__")[0])
        yield from _differs("exports", exported, row.exports if op is None else op.exports)
        yield from _differs("exports", exported, row.exports)
        yield from _differs("needed libraries", symbols.needed, row.needed)
        if symbols.run_path:
            yield f"it has a run path ({', '.join(symbols.run_path)})"
    if "sass" in readers:
        code = readers["sass"](path)
        known = plan().build.archs.get(row.arch)
        yield from _differs("machine code", code.sass, row.sass if known is None else [known.sass])
        yield from _differs("machine code", code.sass, row.sass)
        if code.ptx:
            yield f"it holds PTX ({', '.join(code.ptx)})"


def _differs(what: str, got: Any, expected: Any) -> Iterator[str]:
    if sorted(got) != sorted(expected):
        yield f"{what}: {', '.join(sorted(got)) or 'none'}; expected {', '.join(sorted(expected))}"


def _readers() -> tuple[dict[str, Any], list[str]]:
    """The functions that examine a library, and the checks that cannot run here."""
    from precast._base.errors import ToolchainError
    from precast._base.shared_object import EXPORT_PREFIX
    from precast._runtime import elf

    readers: dict[str, Any] = {}
    skipped = []
    try:
        import elftools  # noqa: F401
    except ImportError:
        skipped.append(f"exports and needed libraries (no pyelftools). Fix: {elf.INSTALL_HINT}")
    else:
        readers.update(elf=elf.read_symbols, prefix=EXPORT_PREFIX)
    try:
        elf.find_cuobjdump()
    except ToolchainError as error:
        skipped.append(f"machine code ({error})")
    else:
        readers["sass"] = elf.read_machine_code
    return readers, skipped
