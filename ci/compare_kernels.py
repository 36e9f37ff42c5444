#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Show that a change left the machine code of the kernels alone.

::

    git worktree add /tmp/before main
    PYTHONPATH=/tmp/before/python python -m precast.aot --profile core --arch 9.0a --out-dir OLD
    PYTHONPATH=python             python -m precast.aot --profile core --arch 9.0a --out-dir NEW
    python ci/compare_kernels.py OLD NEW

Every kernel of every module is paired by its demangled name, after ``ci/kernel_names.toml`` renamed
the old one. Its ``.text`` section must be byte-equal, and its registers, stack, local and shared
memory, parameter size and launch bounds must be the same. Where the map says that a parameter
struct changed, the instructions may differ in their offsets into constant bank 0, and in nothing
else. The exit status is 1 where a kernel differs or has no partner.

It needs cuobjdump and pyelftools (``pip install "precast[build]"``), c++filt (binutils), and, once
two kernels differ, nvdisasm (``pip install "precast[test]"``).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "python")]
from cubins import Kernel, read_kernels  # noqa: E402

from precast._plan.planner import Plan  # noqa: E402
from precast._runtime.manifest import MANIFEST_NAME, read_manifest  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

INSTRUCTION_BYTES = 16
#: In the instructions of sm70 and later, the 16 bits of an offset into a constant bank.
CONSTANT_OFFSET_BITS = 0xFFFF << 38
#: ``c[0x0][0x210]``, ``c[0x0][R4+0x210]`` or ``c[0x0][R4]`` in a disassembly.
CONSTANT = re.compile(r"c\[0x0\]\[(?P<index>U?R\w+(?:\.\w+)?)?\+?(?P<offset>-?0x[0-9a-f]+)?\]")
DECLARE = "Fix: if a parameter struct was changed on purpose, a row [[parameters]] in the map"


class Verdict(Enum):
    EQUAL = "equal"
    CONSTANTS = "equal but for constant-bank offsets"
    EXCEPTED = "excepted"
    DIFFERENT = "different"


class Result(NamedTuple):
    module: str
    kernel: str
    verdict: Verdict
    detail: str = ""


# -- the map --------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """Kernels of the new tree for which a difference has a reason."""

    kernels: re.Pattern[str]
    reason: str


class NameMap(NamedTuple):
    """What ``ci/kernel_names.toml`` says."""

    identifiers: Mapping[str, str] = MappingProxyType({})
    patterns: tuple[tuple[str, str], ...] = ()
    names: Mapping[str, str] = MappingProxyType({})
    parameters: tuple[Rule, ...] = ()
    exceptions: tuple[Rule, ...] = ()

    @classmethod
    def load(cls, path: Path) -> NameMap:
        """Read the map.

        Raises
        ------
        ValueError
            If it holds a table or a key that has no meaning.
        """
        document: dict[str, Any] = tomllib.loads(path.read_text())
        unknown = document.keys() - set(cls._fields)
        if unknown:
            raise ValueError(f"{path}: unknown tables {', '.join(sorted(unknown))}")

        def rows(table: str, *keys: str) -> Iterator[tuple[str, ...]]:
            for row in document.get(table, ()):
                if row.keys() != set(keys) or not all(row.values()):
                    raise ValueError(f"{path}: [[{table}]] needs {' and '.join(keys)}: {row}")
                yield tuple(row[key] for key in keys)

        return cls(
            document.get("identifiers", {}),
            tuple((old, new) for old, new in rows("patterns", "old", "new")),
            document.get("names", {}),
            tuple(Rule(re.compile(k), why) for k, why in rows("parameters", "kernels", "reason")),
            tuple(Rule(re.compile(k), why) for k, why in rows("exceptions", "kernels", "reason")),
        )

    def new_name(self, old: str) -> str:
        """The name that an old kernel should have now."""
        # In one pass, so that two names can be exchanged.
        name = re.sub(r"[A-Za-z_]\w*", lambda word: self.identifiers.get(word[0], word[0]), old)
        for pattern, replacement in self.patterns:
            name = re.sub(pattern, replacement, name)
        return self.names.get(name, name)

    def parameter_reason(self, kernel: str) -> str:
        """Why the parameters of a kernel may lie elsewhere; empty if they may not."""
        return next((rule.reason for rule in self.parameters if rule.kernels.search(kernel)), "")

    def exception_reason(self, kernel: str) -> str:
        """Why a kernel may differ; empty if it may not."""
        return next((rule.reason for rule in self.exceptions if rule.kernels.search(kernel)), "")


# -- comparison -----------------------------------------------------------------------------------


def compare_kernels(old: Kernel, new: Kernel, parameters_moved: bool) -> tuple[Verdict, str]:
    """What became of one kernel, and where it differs."""
    for what, before, after in (
        *zip(old.resources._fields, old.resources, new.resources, strict=True),
        ("launch attributes", old.launch, new.launch),
        ("constants and globals", old.data, new.data),
    ):
        if before != after and what != "kernel":
            return Verdict.DIFFERENT, f"{what}: {before} before, {after} now"
    if old.constant_bytes != new.constant_bytes and not parameters_moved:
        sizes = f"{old.constant_bytes} bytes before, {new.constant_bytes} now"
        return Verdict.DIFFERENT, f"constant bank 0: {sizes}. {DECLARE}"
    if old.text == new.text:
        return Verdict.EQUAL, ""
    if len(old.text) != len(new.text):
        sizes = f"{len(old.text)} bytes before, {len(new.text)} now"
        return Verdict.DIFFERENT, f"size of the code: {sizes}; {_first_difference(old, new)}"
    problem = _problem_beside_constants(old, new)
    if problem:
        return Verdict.DIFFERENT, problem
    if not parameters_moved:
        return Verdict.DIFFERENT, f"{_first_difference(old, new)}. {DECLARE}"
    return Verdict.CONSTANTS, ""


def _words(kernel: Kernel) -> list[int]:
    steps = range(0, len(kernel.text), INSTRUCTION_BYTES)
    return [int.from_bytes(kernel.text[at : at + INSTRUCTION_BYTES], "little") for at in steps]


def _first_difference(old: Kernel, new: Kernel) -> str:
    """The first instruction that is not the same, in both."""
    pairs = list(zip(_words(old), _words(new)))
    at = next((i for i, (before, after) in enumerate(pairs) if before != after), None)
    if at is None:
        return "one is the beginning of the other"

    def show(kernel: Kernel, word: int) -> str:
        return kernel.disassembly[at] if kernel.disassembly else f"{word:#034x} (no nvdisasm)"

    before, after = (show(*pair) for pair in zip((old, new), pairs[at], strict=True))
    return f"instruction {at} of {len(pairs)}: `{before}` before, `{after}` now"


def _problem_beside_constants(old: Kernel, new: Kernel) -> str:
    """What differs beside offsets into constant bank 0; empty if nothing does."""
    if not (old.disassembly and new.disassembly):
        return f"{_first_difference(old, new)}. Fix: pip install nvidia-cuda-nvdisasm"
    moved: dict[tuple[str | None, str | None], str | None] = {}
    rows = zip(_words(old), _words(new), old.disassembly, new.disassembly)
    for at, (before, after, old_line, new_line) in enumerate(rows):
        where = f"instruction {at}: `{old_line}` before, `{new_line}` now"
        # The bits beside the text: stalls, barriers and reuse, which a disassembly does not show.
        if (before ^ after) & ~CONSTANT_OFFSET_BITS or _masked(old_line) != _masked(new_line):
            return where
        if before != after and not CONSTANT.search(old_line):
            return where
        for source, target in zip(CONSTANT.finditer(old_line), CONSTANT.finditer(new_line)):
            offset = target["offset"] or "0x0"
            if (
                moved.setdefault((source["index"] or "", source["offset"] or "0x0"), offset)
                != offset
            ):
                return f"{where}: this offset became another elsewhere"
    targets = [(index, target) for (index, _), target in moved.items()]
    if len(set(targets)) != len(targets):
        return f"two parameters became one; {_first_difference(old, new)}"
    return ""


def _same_but_offsets(old: Kernel, new: Kernel) -> bool:
    pairs = zip(_words(old), _words(new))
    return len(old.text) == len(new.text) and not any(
        (before ^ after) & ~CONSTANT_OFFSET_BITS for before, after in pairs
    )


def _masked(line: str) -> str:
    return CONSTANT.sub(lambda found: f"c[0x0][{found['index'] or ''}]", line)


def compare_modules(
    module: str, old: dict[str, Kernel], new: dict[str, Kernel], names: NameMap
) -> Iterator[Result]:
    """Compare the kernels of one module."""
    renamed: dict[str, Kernel] = {}
    for name, kernel in old.items():
        target = names.new_name(name)
        if target in renamed:
            raise SystemExit(f"error: {module}: the map gives two kernels the name {target}")
        renamed[target] = kernel
    for name in sorted(renamed.keys() | new.keys()):
        before, after = renamed.get(name), new.get(name)
        if before and after:
            moved = bool(names.parameter_reason(name))
            verdict, detail = compare_kernels(before, after, moved)
        else:
            verdict = Verdict.DIFFERENT
            detail = f"only the {'old' if before else 'new'} build has it"
            left = sorted(new.keys() - renamed.keys()) if before else ()
            same = [n for n in left if before and _same_but_offsets(before, new[n])]
            if same:
                detail += f". Fix: if this is its new name, say so in the map: {', '.join(same)}"
        reason = names.exception_reason(name)
        if verdict is Verdict.DIFFERENT and reason:
            verdict, detail = Verdict.EXCEPTED, f"{reason} ({detail})"
        elif verdict is Verdict.CONSTANTS:
            detail = names.parameter_reason(name)
        yield Result(module, name, verdict, detail)


def compare_folders(old: Path, new: Path, arch: str, names: NameMap) -> Iterator[Result]:
    """Compare the modules of two outputs of ``python -m precast.aot``."""
    libraries = [
        {path.stem: path for path in (folder / arch).glob("*.so")} for folder in (old, new)
    ]
    for folder, found in zip((old, new), libraries, strict=True):
        if not found:
            raise SystemExit(f"error: {folder / arch} holds no modules")
    for module in sorted(libraries[0].keys() | libraries[1].keys()):
        paths = [found.get(module) for found in libraries]
        before, after = (read_kernels(path) if path else {} for path in paths)
        if None in paths:
            which = "new" if paths[0] is None else "old"
            yield Result(module, "", Verdict.DIFFERENT, f"only the {which} build has this module")
        yield from compare_modules(module, before, after, names)


def summary(results: Iterable[Result]) -> str:
    """One line: modules, kernels, and how many of each verdict."""
    rows = list(results)
    counts = [
        f"{sum(row.verdict is verdict for row in rows)} {verdict.value}" for verdict in Verdict
    ]
    modules = len({row.module for row in rows})
    return f"{modules} modules, {len(rows)} kernels: {', '.join(counts)}"


def outdated(folder: Path, arch: str) -> list[str]:
    """The modules of a folder that are not built from the sources of this checkout.

    A build that fails leaves the libraries of an earlier one behind. A folder without a manifest is
    not of ``precast.aot``, and nothing is known of it.
    """
    if not (folder / MANIFEST_NAME).is_file():
        return []
    manifest, plan = read_manifest(folder), Plan.load(ROOT)
    wanted = {
        name: module["fingerprints"].get(f"cu{manifest.cuda_major}", {}).get(arch)
        for name, module in plan.document["modules"].items()
    }
    rows = [row for row in manifest.modules if row.arch == arch]
    return [row.file for row in rows if row.fingerprint != wanted.get(row.name)]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two builds and print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="the build before the change")
    parser.add_argument("new", type=Path, help="the build after it")
    parser.add_argument("--map", type=Path, default=ROOT / "ci" / "kernel_names.toml")
    parser.add_argument("--arch", default="sm90a", help="the folder to compare (%(default)s)")
    parser.add_argument("--all", action="store_true", help="list the equal kernels too")
    args = parser.parse_args(argv)
    results = []
    for result in compare_folders(args.old, args.new, args.arch, NameMap.load(args.map)):
        results.append(result)
        if args.all or result.verdict is not Verdict.EQUAL:
            print(f"{result.verdict.value}: {args.arch}/{result.module}: {result.kernel}")
            if result.detail:
                print(f"    {result.detail}")
    stale = outdated(args.new, args.arch)
    if stale:
        print(f"warning: {args.new} is not a build of this checkout: {', '.join(stale)}")
    print(summary(results))
    return int(any(result.verdict is Verdict.DIFFERENT for result in results))


if __name__ == "__main__":
    sys.exit(main())
