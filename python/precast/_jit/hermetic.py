# SPDX-License-Identifier: Apache-2.0
"""The environment of compilers, which is the same for JIT, ``precast.aot`` and CMake.

nvcc (its ``nvcc.profile`` appends to ``INCLUDES``, ``PTXAS_FLAGS`` and more), gcc, clang and ld
read flags, folders and programs from dozens of variables. Neither the fingerprint nor the cache key
covers them, so a build must not depend on them: compilers get only the variables listed here.
"""

from __future__ import annotations

import os

from precast._jit.ptxas_gate import GATE

#: What compilers need of the environment: their programs and libraries, and where they may write.
PASSED_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "USER")

#: What is set for all of them: messages in English, in which the known causes are looked for.
FIXED_VARIABLES = {"LC_ALL": "C"}


def compiler_environment(**changes: str) -> dict[str, str]:
    """Those of :data:`PASSED_VARIABLES` that are set, the fixed ones, and ``changes``."""
    passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return {**passed, **FIXED_VARIABLES, **changes}


def launcher() -> str:
    """A shell script that runs its arguments in that environment, for build systems."""
    passed = [f'${{{name}+"{name}=${name}"}}' for name in PASSED_VARIABLES]
    fixed = [f"{name}={value}" for name, value in FIXED_VARIABLES.items()]
    return f'{GATE}gate env -i {" ".join([*passed, *fixed])} "$@"\n'
