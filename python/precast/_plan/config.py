# SPDX-License-Identifier: Apache-2.0
"""Read and check ``aot_configs/``: what exists is said there and nowhere else.

Everything wrong in a file is one :class:`~precast.errors.ConfigError` that names the file, the key
and the legal values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from precast._base.errors import ConfigError
from precast._base.names import axis_word
from precast._plan import keys
from precast._plan.table import Table, major_key, read_table, release, version

DTYPES = ("f32", "f16", "bf16", "e4m3", "e5m2", "e2m1", "i32", "i8", "u8")

AxisValue = str | int | bool

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_WORD = re.compile(r"[a-z0-9]+\Z")


@dataclass(frozen=True)
class Arch:
    """One compile target and the devices that its machine code runs on."""

    name: str
    target: str
    serves: tuple[str, ...]
    cuda: tuple[int, int]

    @property
    def number(self) -> int:
        """The target as one integer, 90 for ``9.0a``."""
        return int(re.sub(r"[^0-9]", "", self.target))

    @property
    def sass(self) -> str:
        """The name that nvcc and cuobjdump use, ``sm_90a``."""
        return "sm_" + self.target.replace(".", "")

    @property
    def gencode(self) -> str:
        return f"arch=compute_{self.sass[3:]},code={self.sass}"


@dataclass(frozen=True)
class CudaMajor:
    """What modules of one CUDA major need at run time."""

    major: int
    min_driver: str
    cudart: str
    cudart_wheel: str


@dataclass(frozen=True)
class Profile:
    name: str
    description: str
    include: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()


@dataclass(frozen=True)
class AotBlock:
    """A cartesian product of axis values; empty ``profiles`` means every profile."""

    values: Mapping[str, tuple[AxisValue, ...]]
    profiles: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpConfig:
    """One ``aot_configs/<op>.toml``."""

    name: str
    description: str
    sources: tuple[str, ...]
    exports: tuple[str, ...]
    archs: tuple[str, ...]
    axes: Mapping[str, tuple[AxisValue, ...]]
    aot: tuple[AotBlock, ...]
    own_target: bool = False
    cuda_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildConfig:
    """``aot_configs/build.toml``."""

    cuda_flags: tuple[str, ...]
    cuda_major_flags: Mapping[int, tuple[str, ...]]
    host_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    version_script: str
    tvm_ffi_min: str
    tvm_ffi_max_exclusive: str
    cuda: Mapping[int, CudaMajor]
    archs: Mapping[str, Arch]
    profiles: Mapping[str, Profile]

    def accepted(self, capability: str) -> list[Arch]:
        """Targets whose code runs on a device of this capability, best first."""
        serving = [a for a in self.archs.values() if capability in a.serves]
        return sorted(serving, key=lambda a: a.number, reverse=True)

    def profile_names(self, name: str) -> set[str]:
        """The profile and all that it includes."""
        if name not in self.profiles:
            raise ConfigError(f"unknown profile {name!r}; legal: {', '.join(self.profiles)}")
        names, todo = set(), [name]
        while todo:
            current = todo.pop()
            if current not in names:
                names.add(current)
                todo.extend(self.profiles[current].include)
        return names


@dataclass(frozen=True)
class Config:
    """All of ``aot_configs/``."""

    build: BuildConfig
    ops: Mapping[str, OpConfig] = field(default_factory=dict)

    def op(self, name: str) -> OpConfig:
        if name not in self.ops:
            raise ConfigError(f"unknown op {name!r}; legal: {', '.join(sorted(self.ops))}")
        return self.ops[name]


def load_config(root: Path) -> Config:
    """Read ``root/aot_configs``.

    Parameters
    ----------
    root : Path
        The folder that holds ``aot_configs``, ``csrc`` and ``include``.

    Raises
    ------
    ConfigError
        If a file is missing, is not TOML, or says something that does not fit.
    """
    folder = root / "aot_configs"
    build = _read_build(folder / "build.toml", root)
    ops: dict[str, OpConfig] = {}
    for path in sorted(folder.glob("*.toml")):
        if path.name != "build.toml":
            op = _read_op(path, root, build)
            for other in ops.values():
                for export in set(op.exports) & set(other.exports):
                    raise ConfigError(
                        f"aot_configs/{path.name}: exports: {export!r} is also exported by "
                        f"aot_configs/{other.name}.toml; legal: each function in one op"
                    )
            ops[op.name] = op
    return Config(build, ops)


def _read_build(path: Path, root: Path) -> BuildConfig:
    top = read_table(path).only(*keys.BUILD)
    ffi = top.table("tvm_ffi").only(*keys.TVM_FFI)
    flags = top.table("flags").only(*keys.FLAGS)

    cuda = {}
    for key, row in top.rows("cuda"):
        row.only(*keys.CUDA)
        major = major_key(top.table("cuda"), key)
        cuda[major] = CudaMajor(
            major, row.text("min_driver"), row.text("cudart"), row.text("cudart_wheel")
        )

    major_flags = {}
    for key, row in flags.rows("cuda_major", required=False):
        major = major_key(flags.table("cuda_major"), key)
        if major not in cuda:
            raise flags.table("cuda_major").fail(key, "unknown CUDA major", cuda)
        major_flags[major] = row.only(*keys.FLAGS_CUDA_MAJOR).texts("cuda")

    archs = {}
    for name, row in top.rows("archs"):
        row.only(*keys.ARCH)
        target = row.text("target")
        if re.fullmatch(r"\d+\.\d[af]?", target) is None:
            raise row.fail("target", f"got {target!r}", "a capability such as '9.0a'")
        if name != "sm" + target.replace(".", ""):
            raise row.fail("target", f"got {target!r}", f"the target that the name {name!r} says")
        serves = row.texts("serves")
        for capability in serves:
            if re.fullmatch(r"\d+\.\d", capability) is None:
                raise row.fail("serves", f"got {capability!r}", "capabilities such as '9.0'")
        if target.rstrip("af") not in serves:
            raise row.fail("serves", f"got {list(serves)}", f"its own {target.rstrip('af')} too")
        archs[name] = Arch(name, target, serves, version(row, "cuda"))

    profile_rows = top.rows("profiles")
    names = [name for name, _ in profile_rows]
    profiles = {
        name: Profile(
            name,
            row.only(*keys.PROFILE).text("description"),
            row.choices("include", names, ()),
            row.choices("archs", archs, ()),
        )
        for name, row in profile_rows
    }

    script = flags.text("version_script")
    if not (root / script).is_file():
        raise flags.fail("version_script", f"{script!r} does not exist", "a file of the project")
    return BuildConfig(
        cuda_flags=flags.texts("cuda"),
        cuda_major_flags=major_flags,
        host_flags=flags.texts("host"),
        link_flags=flags.texts("link"),
        version_script=script,
        tvm_ffi_min=release(ffi, "min"),
        tvm_ffi_max_exclusive=release(ffi, "max_exclusive"),
        cuda=cuda,
        archs=archs,
        profiles=profiles,
    )


def _read_op(path: Path, root: Path, build: BuildConfig) -> OpConfig:
    top = read_table(path).only(*keys.OP)
    if _NAME.match(path.stem) is None or "__" in path.stem:
        raise ConfigError(f"{top.file}: bad op name; legal: lower case words joined by one '_'")

    sources = top.filled("sources")
    for source in sources:
        if Path(source).is_absolute() or ".." in Path(source).parts:
            raise top.fail("sources", f"{source!r} leaves the project", "paths below its root")
        if not (root / source).is_file():
            there = sorted(p.relative_to(root).as_posix() for p in (root / "csrc").rglob("*.c[uc]"))
            raise top.fail("sources", f"{source!r} does not exist", there or "files under csrc/")
        if not source.endswith((".cu", ".cc")):
            raise top.fail("sources", f"{source!r} has an unknown suffix", ("*.cu", "*.cc"))

    axes_table = top.table("axes")
    axes: dict[str, tuple[AxisValue, ...]] = {}
    for axis in axes_table.data:
        if _NAME.match(axis) is None or "__" in axis or axis in ("profiles", "arch"):
            raise axes_table.fail(axis, "bad axis name", "lower case words joined by one '_'")
        axes[axis] = _axis_values(axes_table, axis)

    exports = top.filled("exports")
    for export in exports:
        if _NAME.match(export) is None:
            raise top.fail("exports", f"got {export!r}", "lower case words joined by '_'")
    archs = top.choices("archs", build.archs)
    if not archs:
        raise top.fail("archs", "empty", build.archs)
    blocks = top.data.get("aot", [])
    if not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
        raise top.fail("aot", f"got {blocks!r}", "[[aot]] blocks")
    return OpConfig(
        name=path.stem,
        description=top.text("description"),
        sources=sources,
        exports=exports,
        archs=archs,
        axes=axes,
        aot=tuple(
            _read_block(Table(top.file, block, f"aot[{i}]"), axes, build)
            for i, block in enumerate(blocks)
        ),
        own_target=top.flag("own_target", False),
        cuda_flags=top.texts("cuda_flags", ()),
    )


def _axis_values(table: Table, axis: str) -> tuple[AxisValue, ...]:
    values = table.data[axis]
    if not isinstance(values, list) or not values:
        raise table.fail(axis, f"got {values!r}", "a non-empty list")
    for i, value in enumerate(values):
        if axis == "dtype" or axis.startswith("dtype_"):
            if value not in DTYPES:
                raise table.fail(axis, f"unknown dtype {value!r}", DTYPES)
        elif isinstance(value, str):
            if _WORD.match(value) is None:
                raise table.fail(axis, f"got {value!r}", "words of lower case letters and digits")
        elif not isinstance(value, int) or (not isinstance(value, bool) and value < 0):
            raise table.fail(axis, f"got {value!r}", "words, whole numbers or booleans")
        if axis_word(value) in map(axis_word, values[:i]):
            raise table.fail(axis, f"{value!r} stands twice", "each value once")
    return tuple(values)


def _read_block(
    table: Table, axes: Mapping[str, tuple[AxisValue, ...]], build: BuildConfig
) -> AotBlock:
    table.only(*keys.AOT, *axes)
    values: dict[str, tuple[AxisValue, ...]] = {}
    for axis, legal in axes.items():
        row = table.data.get(axis)
        if row is None:
            raise table.fail(axis, "missing", f"a subset of {list(legal)}")
        if not isinstance(row, list) or not row:
            raise table.fail(axis, f"got {row!r}", f"a subset of {list(legal)}")
        for i, value in enumerate(row):
            if value not in legal:
                raise table.fail(axis, f"{value!r} is outside the axis", legal)
            if value in row[:i]:
                raise table.fail(axis, f"{value!r} stands twice", "each value once")
        values[axis] = tuple(row)
    return AotBlock(values, table.choices("profiles", build.profiles, ()))
