# SPDX-License-Identifier: Apache-2.0
"""What one module of an engine reads of FlashInfer, for ``ci/engine_contract.py``."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol

from peer_sources import module_of

PEER = "flashinfer"
CATCHES = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp)
_RETURNS = "->"  # In front of what a function of the engine returns.
_INSIDE = "[]"  # Behind what a container holds.
_DEPTH = 6  # Of a dotted name: `x = x.y` has no end.


class Engine(Protocol):
    """Who collects what is found."""

    #: The modules of FlashInfer, which tell a module from a name.
    modules: set[str]
    #: What modules of the engine pass on to others: module, name, values.
    exports: dict[str, Mapping[str, Collection[str]]]

    def note(self, value: str, how: str, file: str) -> None:
        """Write down that a file of the engine reads a value."""

    def note_call(self, value: str, call: list[Any]) -> None:
        """Write down that the engine calls a value."""


class Reader(ast.NodeVisitor):
    """Read one module, several times while the engine's ``exports`` grow.

    A value is written as a dotted name, such as ``flashinfer.norm.rmsnorm``; ``()`` behind the name
    of a class says that it is an instance. ``bindings`` holds, for each scope and each name or
    attribute in it, the values that it may have, wherever it gets them: the order of statements
    does not matter.
    """

    def __init__(self, engine: Engine, path: PurePosixPath, text: str) -> None:
        self.engine, self.path, self.tree = engine, path, ast.parse(text)
        self.module = module_of(path)
        above = self.module.rpartition(".")[0]
        self.package = self.module if path.name == "__init__.py" else above
        self.bindings: dict[ast.AST, dict[str, set[str]]] = defaultdict(dict)
        self.above: list[ast.AST] = []
        self.names_peer = PEER in text
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        self.imported = {(self.source(node), a.name) for node in found for a in node.names}

    def source(self, node: ast.ImportFrom) -> str:
        """The module of a ``from`` import, in full."""
        parts = self.package.split(".")
        above = parts[: len(parts) - node.level + 1] if node.level else []
        return ".".join([*above, *filter(None, [node.module])])

    def concerned(self) -> bool:
        """Whether the module names FlashInfer, or gets a name of it from another module."""
        exports = self.engine.exports
        return self.names_peer or any(exports.get(s, {}).get(n) for s, n in self.imported)

    def read(self) -> None:
        self.visit(self.tree)
        own = self.bindings[self.tree]
        self.engine.exports[self.module] = {name: frozenset(own[name]) for name in own if own[name]}

    def visit(self, node: ast.AST) -> None:
        self.above.append(node)
        super().visit(node)
        self.above.pop()

    # -- values

    def scopes(self) -> list[ast.AST]:
        kinds = (*_FUNCTIONS, ast.ClassDef, ast.Module)
        return [node for node in self.above if isinstance(node, kinds)]

    def bind(self, name: str, values: Collection[str], scope: ast.AST | None = None) -> None:
        """Add values of a name; attributes of ``self`` belong to the class around."""
        scopes = self.scopes()
        if name.startswith("self."):
            scopes = [s for s in scopes if isinstance(s, ast.ClassDef)] or scopes
        if values:
            self.bindings[scope or scopes[-1]].setdefault(name, set()).update(values)

    def values(self, node: ast.expr) -> set[str]:
        """What an expression may be of FlashInfer's."""
        if isinstance(node, ast.Name | ast.Attribute):
            text = _dotted(node)
            for scope in reversed(self.scopes()) if text else ():
                if text in self.bindings[scope]:
                    return self.bindings[scope][text]
        if isinstance(node, ast.Attribute):
            found = {v for v in self.values(node.value) if not v.endswith(_INSIDE)}
            return {f"{value}.{node.attr}" for value in found if value.count(".") < _DEPTH}
        if isinstance(node, ast.Subscript):
            found = self.values(node.value)
            return {v.removesuffix(_INSIDE) for v in found if v.endswith(_INSIDE)}
        if isinstance(node, ast.IfExp):
            return self.values(node.body) | self.values(node.orelse)
        return self._returned(node) if isinstance(node, ast.Call) else set()

    def _returned(self, node: ast.Call) -> set[str]:
        named = _named(node)
        if named and _last(node.func) != "find_spec":
            return {".".join(named)}
        if _last(node.func) == "getattr" and len(node.args) > 1:
            return {f"{v}.{n}" for v in self.values(node.args[0]) for n in self.names(node.args[1])}
        called = self.values(node.func)
        returned = {value.removeprefix(_RETURNS) for value in called if value.startswith(_RETURNS)}
        return returned | {f"{value}()" for value in called if _is_class(value)}

    def names(self, node: ast.expr) -> list[str]:
        """The strings that an expression may be: a constant, or what a loop goes through."""
        found = [node]
        for above in self.above:
            comprehension = isinstance(above, _COMPREHENSIONS)
            loops: Sequence[Any] = above.generators if comprehension else [above]  # type: ignore[attr-defined]
            for loop in loops:
                if isinstance(loop, ast.For | ast.comprehension) and (
                    isinstance(loop.target, ast.Name) and loop.target.id == _dotted(node)
                ):
                    found += getattr(loop.iter, "elts", [])
        return [str(word.value) for word in found if isinstance(word, ast.Constant)]

    def instances(self, annotation: ast.expr | None) -> set[str]:
        """Instances of the classes that an annotation names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:  # A text inside of Annotated or Literal.
                return set()
        if isinstance(annotation, ast.BinOp):
            return self.instances(annotation.left) | self.instances(annotation.right)
        if isinstance(annotation, ast.Tuple):
            return {value for part in annotation.elts for value in self.instances(part)}
        if isinstance(annotation, ast.Subscript):
            inside = self.instances(annotation.slice)
            union = _last(annotation.value) in ("Optional", "Union")
            return inside if union else {value + _INSIDE for value in inside}
        return {f"{v}()" for v in self.values(annotation) if _is_class(v)} if annotation else set()

    # -- facts

    def note(self, value: str, how: str | None = None) -> None:
        """Write down that the module reads a value, where it is being visited."""
        checked = any(isinstance(a, ast.If) and _dotted(a.test) in _TYPES for a in self.above)
        if not checked and not value.startswith(_RETURNS):
            self.engine.note(value, how or self.how(), str(self.path))

    def how(self) -> str:
        """How the place is reached that is being visited."""
        guarded = conditional = False
        for above, below in zip(self.above, self.above[1:]):
            if isinstance(above, ast.Try) and below in above.body:
                caught = [h.type and ast.unparse(h.type) for h in above.handlers]
                guarded |= any(t is None or CATCHES & {*re.findall(r"\w+", t)} for t in caught)
            conditional |= isinstance(above, ast.If)
        if guarded:
            return "guarded"
        if any(isinstance(above, _FUNCTIONS) for above in self.above):
            return "function"
        return "conditional" if conditional else "module"

    # -- statements

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == PEER:
                self.engine.modules.add(alias.name)
                self.note(alias.name)
                self.bind(alias.asname or PEER, {alias.name if alias.asname else PEER})

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = self.source(node)
        for alias in node.names:
            values: Collection[str] = self.engine.exports.get(source, {}).get(alias.name, ())
            if source.partition(".")[0] == PEER:
                self.engine.modules.add(source)
                values = {f"{source}.{alias.name}"}
                self.note(*values)
            self.bind(alias.asname or alias.name, values)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        args = node.args
        for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]:
            # An argument hides a name of the module, even if nothing is known of it.
            self.bindings[node].setdefault(arg.arg, set()).update(self.instances(arg.annotation))
        around = self.scopes()[-2]
        name = f"self.{node.name}" if isinstance(around, ast.ClassDef) else node.name
        self.bind(name, {_RETURNS + value for value in self.instances(node.returns)}, around)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.bind(_dotted(target), self.values(node.value))
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        values = self.values(node.value) if node.value else set()
        name = _dotted(node.target)
        if isinstance(self.scopes()[-1], ast.ClassDef):
            name = f"self.{name}"
        self.bind(name, self.instances(node.annotation) | values)
        self.generic_visit(node)

    # -- expressions

    def visit_Attribute(self, node: ast.Attribute) -> None:
        for value in self.values(node) if isinstance(node.ctx, ast.Load) else ():
            if "()" not in value and value not in self.engine.modules:
                self.note(value)
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        words = [e.value for e in node.elts if isinstance(e, ast.Constant)]
        if len(words) == len(node.elts) == 2 and str(words[0]).startswith(f"{PEER}."):
            self.note(".".join(map(str, words)), "probed")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function, named = _last(node.func), _named(node)
        if function in ("hasattr", "getattr") and len(node.args) > 1:
            probed = function == "hasattr" or len(node.args) > 2
            for value in self.values(node.args[0]):
                for name in self.names(node.args[1]) if "()" not in value else ():
                    self.note(f"{value}.{name}", "probed" if probed else None)
        elif named:
            if len(named) == 1:
                self.engine.modules.add(named[0])
            how = "lazy" if len(named) > 1 else "probed" if function == "find_spec" else None
            self.note(".".join(named), how)
        elif function == "isinstance" and len(node.args) == 2:
            self.bind(_dotted(node.args[0]), self.instances(node.args[1]))
        elif function == "partial" and node.args:
            for value in self.values(node.args[0]):
                self.engine.note_call(value, [*_arguments(node, 1), "*"])
        for value in self.values(node.func):
            if not value.startswith(_RETURNS):
                self.engine.note_call(value, _arguments(node))
        self.generic_visit(node)


_TYPES = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _dotted(node: ast.expr) -> str:
    """``a.b.c``, or nothing if it is not such a name."""
    if isinstance(node, ast.Name):
        return node.id
    above = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{above}.{node.attr}" if above and isinstance(node, ast.Attribute) else ""


def _last(node: ast.expr) -> str:
    return _dotted(node).rpartition(".")[2]


def _is_class(value: str) -> bool:
    name = value.rpartition(".")[2].lstrip("_")
    return value[:2] != _RETURNS and name[:1].isupper() and name.isidentifier()


def _named(node: ast.Call) -> list[str]:
    """The module, or the module and the name, that a call gets as strings in order to import."""
    words = []
    for argument in node.args[:2]:
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            break
        words.append(argument.value)
    imports = re.search("import|spec|module", _last(node.func), re.I)
    module = rf"{PEER}(\.\w+)*" if imports else rf"{PEER}(\.\w+)+"
    if not words or not re.fullmatch(module, words[0]):
        return []
    return words if len(words) < 2 or words[1].isidentifier() else words[:1]


def _arguments(node: ast.Call, skip: int = 0) -> list[Any]:
    """How many arguments go by position, which by keyword, and ``*`` if there may be more."""
    stars = any(isinstance(a, ast.Starred) for a in node.args)
    count = sum(not isinstance(a, ast.Starred) for a in node.args) - skip
    more = ["*"] if stars or any(k.arg is None for k in node.keywords) else []
    return [count, *sorted(k.arg for k in node.keywords if k.arg), *more]
