# SPDX-License-Identifier: Apache-2.0
"""The environment that compilers run in: the same for JIT, ``precast.aot`` and CMake."""

from __future__ import annotations

import os

#: Variables by which nvcc, gcc, clang or ld silently take further flags, folders or programs. The
#: fingerprint and the cache key do not cover them, so a build must not depend on them.
IGNORED_VARIABLES = (
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
    "NVCC_CCBIN",
    "CCC_OVERRIDE_OPTIONS",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "LD_RUN_PATH",
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
)


def compiler_environment(**changes: str) -> dict[str, str]:
    """The environment of this process without :data:`IGNORED_VARIABLES`, with ``changes``."""
    kept = {k: v for k, v in os.environ.items() if k not in IGNORED_VARIABLES}
    return {**kept, **changes}
