# SPDX-License-Identifier: Apache-2.0
"""The environment of compilers, which is the same for JIT, ``precast.aot`` and CMake."""

from __future__ import annotations

import os

#: Variables that silently add flags, folders or programs to nvcc, gcc, clang or ld. Neither the
#: fingerprint nor the cache key covers them, so a build must not depend on them.
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
