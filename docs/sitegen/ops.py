# SPDX-License-Identifier: Apache-2.0
"""The reference pages: one for each op that ``precast`` exports, and one for each public module."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

import precast
from precast import errors
from precast._base.names import module_name
from precast._op.dispatch import kernels
from precast._plan.config import OpConfig
from precast._plan.installed import plan
from sitegen import markup
from sitegen.public import Public, exported, modules

FOLDER = "reference"


def family(public: Public) -> str | None:
    """The op that a function belongs to; None if it is no op."""
    if not public.is_op:
        return None
    if public.name in kernels():
        return kernels()[public.name].op
    value = getattr(precast, public.name)
    # A kernel whose calls are none of the function is a step of it.
    ops = {k.op for k in kernels().values() if k.function == public.name and k.traced}
    if len(ops) == 1 and not inspect.isclass(value):
        return ops.pop()  # Its exports have other names.
    folder = value.__module__.split(".")[2]
    if inspect.isclass(value) and folder in wrappers().values():
        return folder  # A wrapper of other wrappers is on their page.
    # An op without kernels of its own is named after the public module that exports it.
    module = public.module.__name__.rpartition(".")[2]
    return wrappers().get(module, module)


def wrappers() -> dict[str, str]:
    """The op of wrapper classes and their helpers, by the public module of both."""
    modules = {public.name: public.module.__name__.rpartition(".")[2] for public in exported()}
    functions = [
        (kernel.function, kernel.op)
        for kernel in kernels().values()
        if hasattr(precast, kernel.function)  # precast.comm's are in that module alone
    ]
    ops = {op for function, op in functions if inspect.isclass(getattr(precast, function))}
    found: dict[str, str] = {}
    for function, op in functions:
        if op in ops and function in modules:
            # Of a wrapper's ops the one named as its family does the work, and others help.
            family = getattr(precast, function).__module__.split(".")[2]
            found.setdefault(modules[function], family if family in ops else op)
    return found


def library() -> Iterator[ModuleType]:
    """Public modules that are neither ops nor the errors, which have their own pages."""
    ops = {public.module.__name__ for public in exported() if public.is_op}
    for module in modules():
        if getattr(module, "__all__", ()) and module is not errors and module.__name__ not in ops:
            yield module


def families() -> dict[str, list[Public]]:
    """The functions of each op, in the order in which ``precast`` exports them."""
    found: dict[str, list[Public]] = {}
    for public in exported():
        op = family(public)
        if op is not None:
            found.setdefault(op, []).append(public)
    return found


def dtypes(op: str) -> str:
    """The element types of an op, as plain words: ``f16, bf16; dtype_out e4m3, e5m2``."""
    config = plan().config.ops.get(op)
    axes = config.axes if config is not None else {}
    parts = []
    for name, values in axes.items():
        if name.startswith("dtype"):
            words = ", ".join(map(str, values))
            parts.append(words if name == "dtype" else f"`{name}` {words}")
    return "; ".join(parts) or "-"


def pages() -> dict[str, str]:
    """All pages of the reference by their paths."""
    ops = families()
    made = {f"{FOLDER}/ops/{op}.md": _op_page(op, functions) for op, functions in ops.items()}
    made[f"{FOLDER}/runtime.md"] = _runtime_page([p for p in exported() if family(p) is None])
    others = list(library())
    for module in others:
        made[f"{FOLDER}/{module.__name__}.md"] = _module_page(module)
    made[f"{FOLDER}/index.md"] = _index(ops, others)
    return made


def _op_page(op: str, functions: list[Public]) -> str:
    config = plan().config.ops.get(op)
    parts = [f"# {op}\n"]
    if config is not None:
        parts.append(f"{config.description[0].upper()}{config.description[1:]}.\n")
        parts.append(_configurations(config))
    parts.append(_in_common(op))
    parts += [_entry(public.path, f"precast.{public.name}") for public in functions]
    references = list(dict.fromkeys(p.reference for p in functions if p.reference is not None))
    if references:
        parts.append("## References\n")
        parts.append(
            "The same operations in plain PyTorch. The tests compare with them, and "
            "[reference mode][precast.reference_mode] runs them.\n"
        )
        parts += [_entry(path, path.rpartition(".")[2], level=3) for path in references]
    return "\n".join(parts)


def _in_common(op: str) -> str:
    """The docstring of the public module of this name, if it has more than one paragraph."""
    found = next((module for module in modules() if module.__name__ == f"precast.{op}"), None)
    if found is None or len((found.__doc__ or "").strip().split("\n\n")) < 2:
        return ""
    return f"{_entry(found.__name__, found.__name__)}      members: false\n"


def _configurations(config: OpConfig) -> str:
    """The configurations of an op, and which of them are prebuilt."""
    axes = [(_codes(axis.names), _codes(axis.words())) for axis in config.space.axes]
    blocks = [
        (
            _codes(block.profiles) if block.profiles else "all",
            "; ".join(f"{_codes(a.names)}: {_codes(a.words())}" for a in block.space.axes),
        )
        for block in config.aot
    ]
    first = next(config.space.points())
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
        "# Run time\n\n`precast` exports these besides the operators. Errors are described under "
        "[Errors and fixes](../errors.md).\n"
    )
    return "\n".join([lead, *(_entry(p.path, f"precast.{p.name}") for p in functions)])


def _module_page(module: ModuleType) -> str:
    # Names that a module re-exports are on the page of the errors or of the run time.
    elsewhere = [public.name for public in exported()]
    members = [n for n in module.__all__ if n not in elsewhere and not hasattr(errors, n)]
    entries = [_entry(f"{module.__name__}.{name}", name) for name in members]
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


def _index(families: dict[str, list[Public]], others: list[ModuleType]) -> str:
    rows = [
        (
            f"[{op}](ops/{op}.md)",
            ", ".join(f"[`{p.name}`][{p.path}]" for p in functions),
            dtypes(op),
        )
        for op, functions in families.items()
    ]
    libraries = [
        (f"[`{m.__name__}`]({m.__name__}.md)", markup.summary(m.__doc__ or "")) for m in others
    ]
    return "\n".join(
        [
            "# Reference\n",
            "Made from the docstrings and the configuration files of this version.\n",
            "## Operators\n",
            markup.table(("Family", "Functions", "Dtypes"), rows),
            "## Run time\n",
            "[Loading, freezing, reference mode](runtime.md): the other exports of `precast`.\n",
            "## Modules\n",
            markup.table(("Module", "Contents"), libraries),
        ]
    )


def _entry(path: str, heading: str, level: int = 2) -> str:
    """A docstring under a heading of our own, with the anchor ``path``."""
    module, _, name = path.rpartition(".")
    # Wrappers share methods in base classes.
    inherited = inspect.isclass(getattr(importlib.import_module(module), name, None))
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
