# SPDX-License-Identifier: Apache-2.0
"""Convert the reStructuredText markup of our docstrings to Markdown, as an extension of griffe.

Numpy docstrings may hold roles (``:func:`scale```), formulas (``.. math::``) and literal blocks.
mkdocstrings reads the sections of a docstring, but treats their text as Markdown.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|attr|mod|exc|data):`(~?)([\w.]+)`")
_MATH = re.compile(r"^( *)\.\. math::(.*)\n((?:\1 +\S.*\n|\s*\n)*)", re.MULTILINE)
_TABLE = re.compile(
    r"^( *)(=+(?: +=+)+)\n(?:((?:\1\S.*\n)+)\1\2\n)?((?:\1.*\n)+?)\1\2\n", re.MULTILINE
)
_LITERAL = re.compile(r"^( *)(\S.*)?::\n\n((?:\1 +\S.*\n|\s*\n)+)", re.MULTILINE)


def markdown(text: str, obj: griffe.Object | None = None) -> str:
    """``text`` in Markdown; its roles become links, resolved from the scope of ``obj``."""
    text = _MATH.sub(_math, text + "\n")
    text = _TABLE.sub(_table, text)
    text = _LITERAL.sub(_literal, text)
    return _ROLE.sub(lambda match: _role(match, obj), text).rstrip("\n")


def _math(match: re.Match[str]) -> str:
    indent, first, rest = match.groups()
    body = textwrap.dedent(rest).strip("\n")
    lines = [line for line in [first.strip(), *body.splitlines()] if line.strip()]
    fenced = "\n".join(["```math", *lines, "```"])
    return textwrap.indent(fenced, indent) + "\n\n"


def _table(match: re.Match[str]) -> str:
    """A simple table; a row without a first cell continues the row before it."""
    indent, rule, header, body = match.groups()
    columns = [(m.start(), m.end()) for m in re.finditer("=+", rule)]
    spans = [*(slice(a, b) for a, b in columns[:-1]), slice(columns[-1][0], None)]
    rows: list[list[str]] = []
    for line in body.splitlines():
        cells = [line[len(indent) :][span].strip() for span in spans]
        if rows and not cells[0]:
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells)]
        else:
            rows.append(cells)
    head = (header or "").splitlines()[:1] or [""]
    titles = [head[0][len(indent) :][span].strip() for span in spans]
    lines = [titles, ["---"] * len(spans), *rows]
    return "".join(f"{indent}| {' | '.join(cells)} |\n" for cells in lines)


def _literal(match: re.Match[str]) -> str:
    indent, lead, body = match.groups()
    fenced = "```text\n" + textwrap.dedent(body).strip("\n") + "\n```"
    said = f"{indent}{lead}:\n\n" if lead else ""
    return said + textwrap.indent(fenced, indent) + "\n\n"


def _role(match: re.Match[str], obj: griffe.Object | None) -> str:
    short, name = match.groups()
    code = f"<code>{name.rpartition('.')[2] if short else name}</code>"
    target = _path(name, obj) if obj is not None else None
    if target is None:
        return code
    # The link is optional, so a name without a page stays plain text.
    return f'<autoref identifier="{target}" optional>{code}</autoref>'


def _path(name: str, obj: griffe.Object) -> str | None:
    """Resolve ``name`` from ``obj``: in its members, its module and the package."""
    package = obj.package
    if name.startswith(f"{package.path}."):
        found = name[len(package.path) + 1 :]
    else:
        for scope in (obj, obj.parent):
            if scope is not None and name in scope.all_members:
                return str(scope.all_members[name].path)
        try:
            return obj.resolve(name)
        except griffe.NameResolutionError:
            found = name
    try:
        return str(package[found].path)
    except (KeyError, griffe.AliasResolutionError):
        return None


def _constructor(cls: griffe.Class) -> None:
    """Give a named tuple the parameters of its docstring, as griffe does for dataclasses."""
    if not any(str(base).rpartition(".")[2] == "NamedTuple" for base in cls.bases):
        return
    kind = griffe.ParameterKind.positional_or_keyword
    fields = [
        griffe.Parameter(name, annotation=field.annotation, kind=kind, default=field.value)
        for name, field in cls.attributes.items()
        if field.annotation is not None
    ]
    parameters = griffe.Parameters(griffe.Parameter("self", kind=kind), *fields)
    cls.set_member("__init__", griffe.Function("__init__", parent=cls, parameters=parameters))


def _completed(obj: griffe.Object, text: str) -> str:
    """The docstring of an op or a class with the entries that decorators add to the source."""
    if not ((obj.is_function or obj.is_class) and obj.path.startswith("precast._ops.")):
        return text
    found: Any = importlib.import_module(obj.module.path)
    for name in obj.path[len(obj.module.path) + 1 :].split("."):
        found = getattr(found, name)
    return inspect.getdoc(inspect.unwrap(found)) or text


class Docstrings(griffe.Extension):
    """Convert every docstring of a package after griffe has read it."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        self._convert(pkg)

    def _convert(self, obj: griffe.Object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(_completed(obj, obj.docstring.value), obj)
        if isinstance(obj, griffe.Class):
            _constructor(obj)
        for member in obj.members.values():
            if not member.is_alias:
                self._convert(member)  # type: ignore[arg-type]
