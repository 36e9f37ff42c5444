# SPDX-License-Identifier: Apache-2.0
"""Variables with which nvcc, gcc, clang and ld silently build something else."""

from __future__ import annotations

from pathlib import Path


def hostile_environment(folder: Path) -> dict[str, str]:
    """Each of them; ``folder`` gets a header that breaks every file that finds it."""
    (folder / "cstdint").write_text("#error a header of the environment was included\n")
    (folder / "stdint.h").write_text("#error a header of the environment was included\n")
    flag, place = f"-I{folder}", str(folder)
    return {
        # nvcc, and what nvcc.profile appends to
        "NVCC_APPEND_FLAGS": "-G",
        "NVCC_PREPEND_FLAGS": "-lineinfo",
        "NVCC_CCBIN": "/nowhere/g++",
        "INCLUDES": flag,
        "SYSTEM_INCLUDES": flag,
        "LIBRARIES": "-lnowhere",
        "PTXAS_FLAGS": "-O0",
        "CUDAFE_FLAGS": "--nowhere",
        "NVVM_FLAGS": "-opt=0",
        # gcc and clang
        "CPATH": place,
        "C_INCLUDE_PATH": place,
        "CPLUS_INCLUDE_PATH": place,
        "GCC_EXEC_PREFIX": "/nowhere/",
        "COMPILER_PATH": "/nowhere",
        "CCC_OVERRIDE_OPTIONS": "# O0",
        "DEPENDENCIES_OUTPUT": f"{folder}/dependencies",
        "SUNPRO_DEPENDENCIES": f"{folder}/dependencies",
        # ld
        "LIBRARY_PATH": place,
        "LD_RUN_PATH": "/nowhere",
        "LDEMULATION": "nowhere",
    }
