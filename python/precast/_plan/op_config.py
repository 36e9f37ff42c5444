# SPDX-License-Identifier: Apache-2.0
"""Read and check ``aot_configs/<op>.toml``: what exists of one op."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from precast._base.errors import ConfigError
from precast._plan import keys
from precast._plan.axes import Axis, AxisValue, Space, read_rows
from precast._plan.axis_keys import names_of
from precast._plan.build_config import BuildConfig
from precast._plan.places import CUTE_DSL_FOLDER
from precast._plan.table import Table, read_table
from precast._plan.tiles import Tiles, read_tiles

DTYPES = ("f32", "f16", "bf16", "e4m3", "e5m2", "e2m1", "i32", "i8", "u8")

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_WORD = re.compile(r"[a-z0-9]+\Z")


@dataclass(frozen=True)
class AotBlock:
    """A prebuilt part of an op's space; empty ``profiles`` means every profile."""

    space: Space
    profiles: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpConfig:
    """One ``aot_configs/<op>.toml``."""

    name: str
    description: str
    sources: tuple[str, ...]
    exports: tuple[str, ...]
    archs: tuple[str, ...]
    space: Space
    aot: tuple[AotBlock, ...]
    tiles: Tiles | None = None
    exact_arch: bool = False
    cuda_flags: tuple[str, ...] = ()

    @property
    def axes(self) -> Mapping[str, tuple[AxisValue, ...]]:
        """Each axis and its values. Not every combination is legal where ``space`` joins axes."""
        return self.space.values

    @property
    def is_cute_dsl(self) -> bool:
        """Whether its kernels are in CuTe DSL; builds without the compiler of it leave it out."""
        return any(source.endswith(".py") for source in self.sources)


def read_op(path: Path, root: Path, build: BuildConfig) -> OpConfig:
    top = read_table(path).only(*keys.OP)
    if _NAME.match(path.stem) is None or "__" in path.stem:
        raise ConfigError(f"{top.file}: bad op name; legal: lower case words joined by one '_'")

    exports = top.filled("exports")
    for export in exports:
        if _NAME.match(export) is None:
            raise top.fail("exports", f"got {export!r}", "lower case words joined by '_'")
    archs = top.choices("archs", build.archs)
    if not archs:
        raise top.fail("archs", "empty", build.archs)
    space = _read_axes(top.table("axes"))
    return OpConfig(
        name=path.stem,
        description=top.text("description"),
        sources=_read_sources(top, root),
        exports=exports,
        archs=archs,
        space=space,
        aot=tuple(_read_block(block, space, build) for block in top.blocks("aot")),
        tiles=read_tiles(top.table("tiles"), space) if "tiles" in top.data else None,
        exact_arch=top.flag("exact_arch", False),
        cuda_flags=top.texts("cuda_flags", ()),
    )


def _read_sources(top: Table, root: Path) -> tuple[str, ...]:
    sources = top.filled("sources")
    for source in sources:
        if Path(source).is_absolute() or ".." in Path(source).parts:
            raise top.fail("sources", f"{source!r} leaves the project", "paths below its root")
        if not (root / source).is_file():
            there = sorted(
                path.relative_to(root).as_posix()
                for folder, pattern in (("csrc", "*.c[uc]"), (CUTE_DSL_FOLDER, "[a-z]*.py"))
                for path in (root / folder).rglob(pattern)
            )
            raise top.fail("sources", f"{source!r} does not exist", there or "files under csrc/")
        if not source.endswith((".cu", ".cc", ".py")):
            raise top.fail("sources", f"{source!r} has an unknown suffix", ("*.cu", "*.cc", "*.py"))
        if source.endswith(".py") and Path(source).parent.as_posix() != CUTE_DSL_FOLDER:
            raise top.fail(
                "sources", f"{source!r} is no kernel in CuTe DSL", f"files of {CUTE_DSL_FOLDER}/"
            )
    return sources


# -- axes -----------------------------------------------------------------------------------------


def _read_axes(table: Table) -> Space:
    axes: list[Axis] = []
    seen: set[str] = set()
    for key in table.data:
        names = names_of(key)
        for name in names:
            if _NAME.match(name) is None or "__" in name or name in ("profiles", "arch"):
                raise table.fail(
                    key, "bad axis name", "lower case words joined by one '_', or several with ','"
                )
            if name in seen:
                raise table.fail(key, f"axis {name!r} is listed twice", "each axis in one key")
            seen.add(name)
        rows = read_rows(table, key, names)
        for name, values in zip(names, zip(*rows)):
            _check_values(table, key, name, values)
        axes.append(Axis(names, rows))
    return Space(tuple(axes))


def _check_values(table: Table, key: str, name: str, values: Iterable[object]) -> None:
    for value in values:
        if name == "dtype" or name.startswith("dtype_"):
            if value not in DTYPES:
                raise table.fail(key, f"unknown dtype {value!r}", DTYPES)
        elif isinstance(value, str):
            if _WORD.match(value) is None:
                raise table.fail(key, f"got {value!r}", "words of lower case letters and digits")
        elif not isinstance(value, int) or (not isinstance(value, bool) and value < 0):
            raise table.fail(key, f"got {value!r}", "words, whole numbers or booleans")


def _read_block(table: Table, space: Space, build: BuildConfig) -> AotBlock:
    table.only(*keys.AOT, *(axis.key for axis in space.axes))
    axes = [Axis(a.names, read_rows(table, a.key, a.names, a)) for a in space.axes]
    return AotBlock(Space(tuple(axes)), table.choices("profiles", build.profiles, ()))
