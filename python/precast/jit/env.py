# SPDX-License-Identifier: Apache-2.0
"""Folders that JIT reads from and writes to.

The installed package is only read. The cache directory is chosen and made when it is first needed:
``PRECAST_CACHE_DIR``, else the user cache directory of the platform, else, where that cannot be
written, a private temporary directory (said once in the log).

``FLASHINFER_WORKSPACE_DIR`` is for engines, which take parts of its name; nothing is kept in it.
"""

from __future__ import annotations

from typing import Any

from precast._jit.env import cache_dir, cache_dirs, workspace_dir
from precast._plan.places import (
    aot_config_dir,
    csrc_dir,
    include_dir,
    source_root,
    write_if_different,
)

__all__ = [
    "aot_config_dir",
    "cache_dir",
    "cache_dirs",
    "csrc_dir",
    "include_dir",
    "source_root",
    "write_if_different",
]


def __getattr__(name: str) -> Any:
    if name == "FLASHINFER_WORKSPACE_DIR":  # Its targets are those of the GPUs, asked for now.
        return workspace_dir()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
