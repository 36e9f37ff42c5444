# SPDX-License-Identifier: Apache-2.0
"""Read and check ``aot_configs/``, the only place that says what exists.

Each mistake in a file raises one :class:`~precast.errors.ConfigError`, which names the file, the
key and the legal values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from precast._base.errors import ConfigError
from precast._plan.axes import AxisValue
from precast._plan.build_config import Arch, BuildConfig, CudaMajor, Profile, read_build
from precast._plan.op_config import DTYPES, AotBlock, OpConfig, read_op

__all__ = [
    "DTYPES",
    "AotBlock",
    "Arch",
    "AxisValue",
    "BuildConfig",
    "Config",
    "CudaMajor",
    "OpConfig",
    "Profile",
    "load_config",
]


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
    build = read_build(folder / "build.toml", root)
    ops: dict[str, OpConfig] = {}
    for path in sorted(folder.glob("*.toml")):
        if path.name != "build.toml":
            op = read_op(path, root, build)
            for other in ops.values():
                for export in set(op.exports) & set(other.exports):
                    raise ConfigError(
                        f"aot_configs/{path.name}: exports: {export!r} is also exported by "
                        f"aot_configs/{other.name}.toml; legal: each function in one op"
                    )
            ops[op.name] = op
    return Config(build, ops)
