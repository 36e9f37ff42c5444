# SPDX-License-Identifier: Apache-2.0
"""The header of the constants by which a GEMM chooses its tile."""

from __future__ import annotations

import math
from pathlib import Path

from precast._plan.table import read_table

#: The file that has the constants, for the header; benchmarks fit them.
SOURCE = "python/precast/_plan/gemm_costs.toml"
_FILE = Path(__file__).with_name("gemm_costs.toml")
_NAMES = (
    "shared_bytes",
    "l2_bytes",
    "dram_bytes",
    "start",
    "block",
    "tile",
    "tile_column",
    "add",
    "add_register",
    "split",
    "split_byte",
    "share",
    "used_by_4",
    "used_by_8",
)


def costs() -> dict[str, float]:
    """The constants of the block-scaled GEMM for sm_90a, by name."""
    table = read_table(_FILE).only("fp8_gemm_sm90").table("fp8_gemm_sm90").only(*_NAMES)
    for name in _NAMES:
        value = table.data.get(name)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise table.fail(name, f"got {value!r}", "a positive number with a decimal point")
    return {name: table.data[name] for name in _NAMES}


def body() -> str:
    """Return what is between the first lines of the header and the end of its namespace."""
    lines = "\n".join(f"  double {name} = {value!r};" for name, value in costs().items())
    return f"""\
// The costs by which the block-scaled GEMM for sm_90a chooses its tile.
#pragma once

namespace precast {{

// Clocks, bytes per clock; the source explains each.
struct Fp8GemmCosts {{
{lines}
}};
"""
