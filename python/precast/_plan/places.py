# SPDX-License-Identifier: Apache-2.0
"""Where the sources of the modules lie: in the installed package, or in a checkout."""

from __future__ import annotations

import functools
from pathlib import Path

from precast._base.version import __version__

#: Where the sources in Python are, relative to the root of the project.
CUTE_DSL_FOLDER = "python/precast/cute_dsl"
#: All that the planner reads, relative to the root; the installed package has the same as data.
SOURCE_FOLDERS = ("aot_configs", "csrc", "include", CUTE_DSL_FOLDER)


def checkout_root() -> Path | None:
    """The source tree that this file lies in, or None when it is installed."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "aot_configs" / "build.toml").is_file() else None


@functools.cache
def source_root() -> Path:
    """The folder with ``aot_configs``, ``csrc`` and ``include``: package data, or the checkout."""
    installed = Path(__file__).resolve().parents[1] / "data"
    if (installed / "aot_configs" / "build.toml").is_file():
        return installed
    root = checkout_root()
    if root is None:
        raise FileNotFoundError(
            f"{installed} is missing: the installation of precast is incomplete. "
            f"Fix: pip install --force-reinstall --no-deps precast=={__version__} (with wheels in "
            f"a folder, add --find-links DIR)"
        )
    return root


def include_dir() -> Path:
    """Device headers, ``#include "precast/norm.cuh"``."""
    return source_root() / "include"


def csrc_dir() -> Path:
    """Launchers, bindings and the checks they share."""
    return source_root() / "csrc"


def aot_config_dir() -> Path:
    """The TOML files that say what exists."""
    return source_root() / "aot_configs"


def write_if_different(path: Path, text: str) -> bool:
    """Write ``text`` unless the file holds it already, so that its time stamp stays."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True
