# SPDX-License-Identifier: Apache-2.0
"""The machine that a bundle is for: its Python, its wheel tags, its environment markers."""

from __future__ import annotations

import platform as host_platform
import re
import sys
from dataclasses import dataclass

from packaging.tags import Tag, compatible_tags, cpython_tags

_LEGACY_MANYLINUX = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@dataclass(frozen=True)
class Target:
    """The machine that the bundle is for.

    Parameters
    ----------
    python : str
        Its minor version, ``"3.12"``.
    platform : str
        Its wheel tag, ``"manylinux_2_28_x86_64"``: older manylinux tags are accepted too.

    Raises
    ------
    ValueError
        If one of them is not of that form.
    """

    python: str
    platform: str

    def __post_init__(self) -> None:
        if re.fullmatch(r"3\.\d+", self.python) is None:
            raise ValueError(f"Python {self.python!r} is not a version; legal example: 3.12")
        if re.fullmatch(r"(manylinux_2_\d+|linux)_[a-z0-9_]+", self.platform) is None:
            raise ValueError(
                f"platform {self.platform!r} is unknown; legal example: manylinux_2_28_x86_64"
            )

    @property
    def machine(self) -> str:
        return re.sub(r"^(manylinux_2_\d+|linux)_", "", self.platform)

    @property
    def platforms(self) -> list[str]:
        """Every platform tag that the target accepts, best first."""
        found = []
        match = re.match(r"manylinux_2_(\d+)_", self.platform)
        for minor in range(int(match[1]), 4, -1) if match else ():
            found.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in _LEGACY_MANYLINUX:
                found.append(f"{_LEGACY_MANYLINUX[minor]}_{self.machine}")
        return [*found, f"linux_{self.machine}"]

    @property
    def tags(self) -> frozenset[Tag]:
        major, minor = map(int, self.python.split("."))
        interpreter = f"cp{major}{minor}"
        return frozenset(
            [
                *cpython_tags((major, minor), [interpreter], self.platforms),
                *compatible_tags((major, minor), interpreter, self.platforms),
            ]
        )

    @property
    def environment(self) -> dict[str, str]:
        """The values of environment markers on the target."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


def this_target() -> Target:
    """The running Python, on any Linux with a glibc of the last years."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Target(python, f"manylinux_2_28_{host_platform.machine()}")
