#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write down what an engine asks of FlashInfer, read from its sources without importing them.

::

    pip download --no-deps --only-binary :all: flashinfer-python==0.7.2.post1 -d build/engines
    pip download --no-deps --only-binary :all: sglang==0.5.23 -d build/engines
    python ci/engine_contract.py --flashinfer build/engines/flashinfer_python-*.whl \
      build/engines/sglang-*.whl build/engines/vllm-0.33.0.tar.gz

A wheel or an sdist replaces the section of its version in the file of facts, and other sections
stay. ``tests/unit/shim/test_engines.py`` holds the shim to the file. A section says::

    "pins":     the version of flashinfer-python that the engine requires
    "modules":  {module: how it is imported}
    "names":    {module and name: {
        "how":      how the engine reaches it, see below
        "calls":    [[number of positional arguments, keywords..., "*" if there may be more]]
        "members":  {attribute of a class or of a function: its calls}
        "methods":  {method of an instance: its calls}
        "files":    the engine's files that cannot be imported without it
    }}

How an engine reaches a name: ``module`` when its own module is imported, ``conditional`` the same
under an ``if``, ``guarded`` in a ``try`` that catches the failure, ``function`` when a function
runs, ``lazy`` through a helper that gets module and name as strings, ``probed`` by ``hasattr``,
``getattr`` with a default, ``find_spec`` or a list of names to look for.

Only what the text of one module says is followed: assignments, annotations, ``isinstance``, and
names that another module of the engine passes on. A method of an object whose class is not said
there is not found. Tests of the engine are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "ci"))
from engine_reader import PEER, Reader  # noqa: E402
from peer_sources import module_of, read_archive  # noqa: E402

FACTS = ROOT / "tests" / "unit" / "shim" / "engines.json"
ENGINES = ("vllm", "sglang")
AT_IMPORT = ("module", "conditional")
# Names come through at most so many modules that pass them on.
_PASSES = 4
_PIN = re.compile(r"^(?:Requires-Dist: )?flashinfer[-_]python(?:\[.*?\])?\s*==\s*([\w.]+)", re.M)


class Engine:
    """The facts of one version of an engine, and what is known while they are collected."""

    def __init__(self, modules: Collection[str]) -> None:
        self.modules = {*modules}
        self.exports: dict[str, Mapping[str, Collection[str]]] = {}
        self.pins = ""
        self.imported: dict[str, set[str]] = defaultdict(set)
        self.names: dict[str, dict[str, Any]] = defaultdict(
            lambda: {"how": set(), "calls": [], "members": {}, "methods": {}, "files": set()}
        )
        self._readers: list[Reader] = []

    def add(self, path: PurePosixPath, text: str) -> None:
        """Take one file of the engine."""
        if path.suffix != ".py":
            pin = _PIN.search(text)
            self.pins = self.pins or (pin[1] if pin else "")
        elif path.parts[0] in ENGINES and not _is_test(path):
            self._readers.append(Reader(self, path, text))

    def read(self) -> dict[str, Any]:
        """The section of the file of facts."""
        for _ in range(_PASSES):
            self.imported.clear()
            self.names.clear()
            for reader in self._readers:
                if reader.concerned():
                    reader.read()
        return _plain({"pins": self.pins, "modules": self.imported, "names": self.names})

    def note(self, value: str, how: str, file: str) -> None:
        module, name, member, _ = self._split(value)
        if not name:
            self.imported[module or PEER].add(how)
            return
        fact = self.names[".".join(filter(None, [module, name]))]
        if member:
            fact["members"].setdefault(member, [])
            return
        fact["how"].add(how)
        if how in AT_IMPORT:
            fact["files"].add(file)

    def note_call(self, value: str, call: list[Any]) -> None:
        module, name, member, instance = self._split(value)
        if not name or "." in member:
            return
        fact = self.names[".".join(filter(None, [module, name]))]
        calls = fact["calls"]
        if member or instance:
            kind = fact["methods" if instance else "members"]
            calls = kind.setdefault(member or "__call__", [])
        if call not in calls:
            calls.append(call)

    def _split(self, value: str) -> tuple[str, str, str, bool]:
        """Module, name, attribute of it, and whether that is one of an instance."""
        parts = value.split(".")
        count = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in self.modules)
        name = parts[count] if count < len(parts) else ""
        member = ".".join(parts[count + 1 :])
        return ".".join(parts[1:count]), name.removesuffix("()"), member, name.endswith("()")


def _is_test(path: PurePosixPath) -> bool:
    return bool({"test", "tests"} & {*path.parts}) or path.name.startswith(("test_", "conftest"))


def _plain(value: Any) -> Any:
    """Sets and calls in order, and nothing that is empty."""
    if isinstance(value, dict):
        members = isinstance(value.get("members"), dict)
        rows = {key: _plain(value[key]) for key in sorted(value)}
        return {key: row for key, row in rows.items() if row or not members}
    if isinstance(value, set | list):
        return sorted(value, key=lambda item: [str(part) for part in item])
    return value


def write(facts: Mapping[str, Any], path: Path) -> None:
    """One line for each name, so that a difference between two versions can be read."""
    lines = []
    for engine in sorted(facts):
        section = facts[engine]
        names = [f"      {json.dumps(n)}: {json.dumps(f)}" for n, f in section["names"].items()]
        head = [
            f'    "pins": {json.dumps(section["pins"])},',
            f'    "modules": {json.dumps(section["modules"])},',
            '    "names": {',
        ]
        body = "\n".join([*head, ",\n".join(names), "    }"])
        lines.append(f"  {json.dumps(engine)}: {{\n{body}\n  }}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def flashinfer_modules(wheel: Path) -> set[str]:
    """The modules of FlashInfer's wheel."""
    files = (path for path, _ in read_archive(wheel) if path.suffix == ".py")
    return {module_of(path) for path in files if path.parts[0] == PEER}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archives", nargs="+", type=Path, metavar="ENGINE", help="wheel or sdist")
    parser.add_argument(
        "--flashinfer", type=Path, required=True, metavar="WHEEL", help="tells its modules"
    )
    parser.add_argument("-o", "--output", type=Path, default=FACTS, metavar="FILE")
    args = parser.parse_args(argv)
    modules = flashinfer_modules(args.flashinfer)
    facts = json.loads(args.output.read_text()) if args.output.is_file() else {}
    for archive in args.archives:
        name, version = re.match(r"(\w+)-([\d.]*\d)", archive.name).groups()  # type: ignore[union-attr]
        engine = Engine(modules)
        for path, text in read_archive(archive):
            engine.add(path, text)
        section = facts[f"{name} {version}"] = engine.read()
        print(f"{name} {version}: {len(section['names'])} names", file=sys.stderr)
    write(facts, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
