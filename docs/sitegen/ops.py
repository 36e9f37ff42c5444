# SPDX-License-Identifier: Apache-2.0
"""The reference: a page for each op that ``precast`` exports, and for each public module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import precast
from precast import errors
from precast._base.names import module_name
from precast._base.public_name import public_name
from precast._op.dispatch import kernels
from precast._plan.config import OpConfig
from precast._plan.installed import plan
from sitegen import markup

FOLDER = "reference"


class Public(NamedTuple):
    """A name that ``precast`` exports, and the path that is its own."""

    name: str
    path: str

    @property
    def reference(self) -> str | None:
        """The path of its PyTorch reference, if it is an op."""
        module, _, name = self.path.rpartition(".")
        home = importlib.import_module(module)
        reference = getattr(getattr(home, name, None), "reference", None)  # that of a class
        if inspect.isfunction(reference):
            return public_name(reference)
        found = hasattr(home, f"{name}_reference")
        return f"{module}.{name}_reference" if found else None


def definition(module: ModuleType, name: str) -> str:
    """The path of a public name of ``module``; a constant is where it is found."""
    value = getattr(module, name)
    named = inspect.isroutine(value) or inspect.isclass(value)
    if named and value.__module__.startswith("precast."):
        return public_name(value)
    return f"{module.__name__}.{name}"


def exported() -> list[Public]:
    """Functions and classes that ``precast`` itself exports, in the order of its stub."""
    return [
        Public(name, definition(precast, name))
        for name, value in ((name, getattr(precast, name)) for name in precast.__all__)
        if not name.startswith("_")
        and (inspect.isroutine(value) or inspect.isclass(value))
        and value.__module__.startswith("precast.")
        and value.__qualname__ == name  # A second name is on the page of the first.
    ]


def family(public: Public) -> str | None:
    """The op that a function belongs to; None for what runs no kernel."""
    if public.name in kernels():
        return kernels()[public.name].op
    # An op made of other ops' kernels, or of none: by the module that it stands in.
    module = public.path.split(".")[1]
    if module in _packages():
        return _packages()[module]
    return module if public.reference is not None or module in plan().config.ops else None


def _packages() -> dict[str, str]:
    """The op of wrappers and of what helps them, by the package that they stand in."""
    functions = [(getattr(precast, kernel.function), kernel.op) for kernel in kernels().values()]
    ops = {op for function, op in functions if inspect.isclass(function)}
    found: dict[str, str] = {}
    for function, op in functions:
        if op in ops:  # The first kernel does the work, others help.
            found.setdefault(public_name(function).split(".")[1], op)
    return found


def library() -> Iterator[ModuleType]:
    """Public modules: those that declare ``__all__``, but for the ops and the command line."""
    ops = {public.path.rpartition(".")[0] for public in exported() if family(public)}
    for info in pkgutil.walk_packages(precast.__path__, "precast."):
        parts = info.name.split(".")[1:]
        if parts[0] in ("cli", "__main__") or any(p.startswith("_") for p in parts):
            continue
        module = importlib.import_module(info.name)
        names = getattr(module, "__all__", ())
        if names and not any(op == info.name or op.startswith(f"{info.name}.") for op in ops):
            yield module


def pages() -> dict[str, str]:
    """All pages of the reference by their paths."""
    families: dict[str, list[Public]] = {}
    runtime = []
    for public in exported():
        op = family(public)
        if op is None:
            runtime.append(public)
        else:
            families.setdefault(op, []).append(public)
    made = {f"{FOLDER}/ops/{op}.md": _op_page(op, functions) for op, functions in families.items()}
    made[f"{FOLDER}/runtime.md"] = _runtime_page(runtime)
    modules = list(library())
    for module in modules:
        made[f"{FOLDER}/{module.__name__}.md"] = _module_page(module)
    made[f"{FOLDER}/index.md"] = _index(families, modules)
    return made


def _op_page(op: str, functions: list[Public]) -> str:
    config = plan().config.ops.get(op)
    parts = [f"# {op}\n"]
    if config is not None:
        parts.append(f"{config.description[0].upper()}{config.description[1:]}.\n")
        parts.append(_configurations(config))
    parts.append(_in_common(op))
    parts += [_entry(public.path, f"precast.{public.name}") for public in functions]
    references = [public.reference for public in functions if public.reference]
    if references:
        parts.append("## References\n")
        parts.append(
            "The same operations in plain PyTorch: what the tests compare with, and what "
            "[reference mode][precast._op.mode.reference_mode] runs.\n"
        )
        parts += [_entry(path, path.rpartition(".")[2], level=3) for path in references]
    return "\n".join(parts)


def _in_common(op: str) -> str:
    """What a package of this name says of all its functions, if it says more than its title."""
    path = f"precast.{op}"
    found = importlib.util.find_spec(path)
    if found is None or found.submodule_search_locations is None:
        return ""
    if len((importlib.import_module(path).__doc__ or "").strip().split("\n\n")) < 2:
        return ""
    return f"{_entry(path, path)}      members: false\n"


def _configurations(config: OpConfig) -> str:
    """What can exist of an op, and what of it is prebuilt."""
    axes = [(f"`{axis}`", _codes(values)) for axis, values in config.axes.items()]
    blocks = [
        (
            _codes(block.profiles) if block.profiles else "all",
            "; ".join(f"`{axis}`: {_codes(values)}" for axis, values in block.values.items()),
        )
        for block in config.aot
    ]
    first = {axis: values[0] for axis, values in config.axes.items()}
    return "\n".join(
        [
            markup.table(("Axis", "Values"), axes),
            f"Targets: {_codes(config.archs)}. A module is one library for one value of each axis "
            f"and one target, such as `{module_name(config.name, first)}`.\n",
            markup.table(("Profile", "Prebuilt"), blocks),
        ]
    )


def _runtime_page(functions: list[Public]) -> str:
    lead = (
        "# Run time\n\nWhat `precast` exports besides the operators. Errors are described under "
        "[Errors and their cure](../errors.md).\n"
    )
    return "\n".join([lead, *(_entry(p.path, f"precast.{p.name}") for p in functions)])


def _module_page(module: ModuleType) -> str:
    # What a module passes on stands on the page of the errors or of the run time.
    elsewhere = [public.name for public in exported()]
    members = [n for n in module.__all__ if n not in elsewhere and not hasattr(errors, n)]
    entries = [_entry(definition(module, name), name) for name in members]
    return "\n".join(
        [
            f"# {module.__name__}\n",
            f"::: {module.__name__}",
            "    options:",
            "      members: false",
            "      show_root_heading: false",
            "      show_root_toc_entry: false\n",
            *entries,
        ]
    )


def _index(families: dict[str, list[Public]], modules: list[ModuleType]) -> str:
    rows = [
        (
            f"[{op}](ops/{op}.md)",
            ", ".join(f"[`{p.name}`][{p.path}]" for p in functions),
            _codes(plan().config.ops[op].axes.get("dtype", ())) if op in plan().config.ops else "",
        )
        for op, functions in families.items()
    ]
    libraries = [
        (f"[`{m.__name__}`]({m.__name__}.md)", markup.summary(m.__doc__ or "")) for m in modules
    ]
    return "\n".join(
        [
            "# Reference\n",
            "Made from the docstrings and the configuration files of this version.\n",
            "## Operators\n",
            markup.table(("Family", "Functions", "Dtypes"), rows),
            "## Run time\n",
            "[Loading, freezing, reference mode](runtime.md): what `precast` exports besides.\n",
            "## Modules\n",
            markup.table(("Module", "What it holds"), libraries),
        ]
    )


def _entry(path: str, heading: str, level: int = 2) -> str:
    """A docstring under a heading of our own; ``path`` may lead through a private module."""
    module, _, name = path.rpartition(".")
    # What a wrapper shares with others stands in a base class of its own.
    inherited = inspect.isclass(getattr(sys.modules.get(module), name, None))
    return (
        f"::: {path}\n"
        f"    options:\n"
        f"      inherited_members: {str(inherited).lower()}\n"
        f'      heading: "{heading}"\n'
        f'      toc_label: "{heading.rpartition(".")[2]}"\n'
        f"      heading_level: {level}\n"
    )


def _codes(values: object) -> str:
    return ", ".join(f"`{value}`" for value in values)  # type: ignore[attr-defined]
