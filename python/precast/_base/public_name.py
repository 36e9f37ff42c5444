# SPDX-License-Identifier: Apache-2.0
"""The path by which users know a function or class of precast.

An op is defined in ``precast._ops.norm.rmsnorm`` and exported by ``precast.norm``, so that logs,
dumps, traces and the documentation call it ``precast.norm.rmsnorm``. What a public module exports
stands in its source, so nothing is imported to find a name.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]


def public_name(value: Callable[..., Any]) -> str:
    """``<public module>.<qualname>`` of a function, class or method.

    What no public module exports keeps the module that defines it. A method that a public class
    inherits from a private one has the name of the public class.
    """
    module, qualname = value.__module__, value.__qualname__
    if not module.startswith("precast."):
        return f"{module}.{qualname}"
    owner, dot, attribute = qualname.partition(".")
    if dot and (module, owner) not in exports():
        for kind in _subclasses(getattr(sys.modules.get(module), owner, None)):
            if (kind.__module__, kind.__qualname__) in exports():
                module, qualname = kind.__module__, f"{kind.__qualname__}.{attribute}"
                break
    return f"{exports().get((module, qualname.partition('.')[0]), module)}.{qualname}"


def _subclasses(kind: Any) -> Iterator[type]:
    """All subclasses of a class, the nearest first; nothing for anything else."""
    todo: list[type] = type.__subclasses__(kind) if isinstance(kind, type) else []
    while todo:
        yield todo[0]
        todo = [*todo[1:], *type.__subclasses__(todo[0])]


@functools.cache
def exports() -> dict[tuple[str, str], str]:
    """The public module of each exported name, by the module that defines it and the name.

    The modules in ``precast`` come first, by name, then ``precast`` itself; the first counts.
    """
    found: dict[tuple[str, str], str] = {}
    for module, source in _public_modules():
        tree = ast.parse(source.read_text(encoding="utf-8"))
        listed = _listed(tree)
        for line in tree.body:
            # A public module that takes a name from another one is not where the name belongs.
            if isinstance(line, ast.ImportFrom) and str(line.module).count(".") > 1:
                for alias in line.names:
                    if alias.name in listed or alias.asname == alias.name:
                        found.setdefault((str(line.module), alias.name), module)
    return found


def _listed(tree: ast.Module) -> set[str]:
    """The names in ``__all__``; a stub has none, it exports what it imports as itself."""
    for line in tree.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__all__":
            return set(ast.literal_eval(line.value))
    return set()


def _public_modules() -> Iterator[tuple[str, Path]]:
    """Every public module with the file that lists what it exports: the stub if there is one."""
    for path in sorted(_ROOT.iterdir()):
        if path.name.startswith("_"):
            continue
        if path.suffix == ".py":
            yield f"precast.{path.stem}", path
        for name in ("__init__.pyi", "__init__.py"):
            if (path / name).is_file():
                yield f"precast.{path.name}", path / name
                break
    yield "precast", _ROOT / "__init__.pyi"
