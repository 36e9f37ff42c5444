# SPDX-License-Identifier: Apache-2.0
"""Folders that JIT reads from and writes to.

The installed package is only read. The cache directory is chosen and made when it is first needed:
``PRECAST_CACHE_DIR``, else the user cache directory of the platform, else, where that cannot be
written, a private temporary directory (said once in the log).
"""

from __future__ import annotations

from precast._jit.env import cache_dir, cache_dirs
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
