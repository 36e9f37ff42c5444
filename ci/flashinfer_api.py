#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write down the signatures of FlashInfer's public names, read from its wheel without importing it.

::

    pip download --no-deps --only-binary :all: flashinfer-python==0.7.2.post1 -d build/engines
    PYTHONPATH=python python ci/flashinfer_api.py build/engines/flashinfer_python-0.7.2.post1-*.whl

``tests/unit/shim/test_signatures.py`` holds precast to the file of facts. It has what is defined in
the modules that ``precast.shim`` serves with ops, and what is exported at the top level::

    "norm.rmsnorm": "input, weight, eps=1e-06, out=None"        a function
    "decode.Wrapper": {"__init__": "self, ...", "plan": "..."}  a class, with its public methods
    "rmsnorm": "= norm.rmsnorm"                                 another name of one in the file

A default is the text of FlashInfer's source. Constants and enums are left out, as are generators of
JIT modules.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "ci"))
sys.path.insert(0, str(ROOT / "python"))
from engine_reader import PEER  # noqa: E402
from peer_sources import module_of, read_archive  # noqa: E402

from precast.shim import of_precast  # noqa: E402

FACTS = ROOT / "tests" / "unit" / "shim" / "flashinfer.json"
_OF_JIT = re.compile(r"gen_\w+|get_\w+_(module|uri)")
Definition = ast.FunctionDef | ast.ClassDef


class Package:
    """The modules of a wheel."""

    def __init__(self, wheel: Path) -> None:
        files = {p: text for p, text in read_archive(wheel) if p.parts[0] == PEER}
        self._texts = {module_of(path): text for path, text in files.items()}
        self._packages = {module_of(path) for path in files if path.name == "__init__.py"}
        self._trees: dict[str, ast.Module] = {}

    def statements(self, module: str) -> Iterator[ast.stmt]:
        """Those of a module, and those under its conditions; none if there is no such module."""
        if module not in self._trees:
            self._trees[module] = ast.parse(self._texts.get(module, ""))
        stack: list[ast.stmt] = [*reversed(self._trees[module].body)]
        while stack:
            node = stack.pop()
            yield node
            if isinstance(node, ast.If | ast.Try):
                stack.extend(reversed([*node.body, *node.orelse]))

    def source(self, module: str, node: ast.ImportFrom) -> str:
        """The module of a ``from`` import, in full."""
        if not node.level:
            return node.module or ""
        above = module.split(".")
        above = above[: len(above) - node.level + (module in self._packages)]
        return ".".join([*above, *filter(None, [node.module])])

    def find(self, module: str, name: str, depth: int = 8) -> tuple[str, Definition] | None:
        """Where a function or a class is defined, and its last definition."""
        found = None
        for node in self.statements(module) if depth else ():
            if isinstance(node, Definition) and node.name == name and not _is_overload(node):
                found = f"{module}.{name}", node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*":
                        found = self.find(self.source(module, node), name, depth - 1) or found
                    elif (alias.asname or alias.name) == name:
                        found = self.find(self.source(module, node), alias.name, depth - 1) or found
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                value = node.value.id if isinstance(node.value, ast.Name) else ""
                found = self.find(module, value, depth - 1) or found
        return found

    def names(self, module: str) -> list[str]:
        """The public names that a module binds."""
        found = set()
        for node in self.statements(module):
            if isinstance(node, Definition):
                found.add(node.name)
            if isinstance(node, ast.ImportFrom) and self.source(module, node).startswith(PEER):
                found |= {alias.asname or alias.name for alias in node.names}
                if "*" in found:
                    found.remove("*")
                    found.update(self.names(self.source(module, node)))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return sorted(n for n in found if not n.startswith("_") and not _OF_JIT.fullmatch(n))


def _is_overload(node: Definition) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_property(node: Definition) -> bool:
    return any(
        "property" in ast.unparse(d) or "setter" in ast.unparse(d) for d in node.decorator_list
    )


def signature(definition: Definition) -> str | dict[str, str]:
    """The parameters of a function, or of each public method of a class, without annotations."""
    if isinstance(definition, ast.FunctionDef):
        args = copy.deepcopy(definition.args)
        for node in ast.walk(args):
            if isinstance(node, ast.arg):
                node.annotation = None
        return ast.unparse(args)
    methods: dict[str, str] = {}
    for node in definition.body:
        public = isinstance(node, ast.FunctionDef) and node.name.removeprefix("__init__")[:1] != "_"
        if public and not _is_overload(node) and not _is_property(node):
            methods[node.name] = re.sub(r"^cls(, )?", "", str(signature(node)))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            same = methods.get(node.value.id)
            if same is not None:
                methods |= {ast.unparse(target): same for target in node.targets}
    return methods


def api(package: Package) -> dict[str, Any]:
    """The signatures by public name."""
    signatures: dict[str, Any] = {}
    first: dict[str, str] = {}
    for path in [*sorted({*of_precast()} - {""}), ""]:
        module = f"{PEER}.{path}".rstrip(".")
        for name in package.names(module):
            place, definition = package.find(module, name) or ("", None)
            public = f"{path}.{name}".lstrip(".")
            if definition is None or (path and not place.startswith(f"{module}.")):
                continue
            if place in first:
                signatures[public] = f"= {first[place]}"
            else:
                first[place] = public
                signatures[public] = signature(definition)
    return {name: row for name, row in sorted(signatures.items()) if row != {}}


def write(version: str, signatures: Mapping[str, Any], path: Path) -> None:
    """One line for each name."""
    rows = [f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in signatures.items()]
    head = f'  "version": {json.dumps(version)},\n  "names": {{\n'
    path.write_text("{\n" + head + ",\n".join(rows) + "\n  }\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="the wheel of flashinfer-python")
    parser.add_argument("-o", "--output", type=Path, default=FACTS, metavar="FILE")
    args = parser.parse_args(argv)
    signatures = api(Package(args.wheel))
    write(args.wheel.name.split("-")[1], signatures, args.output)
    print(f"{len(signatures)} names", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
