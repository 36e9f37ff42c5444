# SPDX-License-Identifier: Apache-2.0
"""The header of the constants by which a GEMM chooses its tile."""

from __future__ import annotations

import math
from pathlib import Path

from precast._plan.table import read_table

#: The file that has the constants, for the header; benchmarks fit them.
SOURCE = "python/precast/_plan/gemm_costs.toml"
_FILE = Path(__file__).with_name("gemm_costs.toml")
#: The struct of the header for each op, and what the op is; "_few" behind an op: for few tokens.
_STRUCTS = {
    "fp8_gemm_sm90": ("Fp8GemmCosts", "block-scaled GEMM"),
    "gemm_sm90": ("Gemm16Costs", "GEMM of 16-bit operands"),
    "gemm_sm90_few": ("Gemm16FewCosts", "GEMM of few tokens and 16-bit operands"),
    "scaled_gemm_sm90": ("ScaledGemmCosts", "GEMM of e4m3 operands with scales of rows"),
    "scaled_gemm_sm90_few": (
        "ScaledGemmFewCosts",
        "GEMM of few tokens and e4m3 operands with scales of rows",
    ),
}
OPS = tuple(_STRUCTS)
_NUMBERS = (
    "shared_bytes",
    "fill_bytes",
    "l2_bytes",
    "dram_bytes",
    "start",
    "split_byte",
    "share",
    "pair",
    "used_by_4",
    "used_by_8",
    "missing",
)
#: Those that have a number for each tile, or for each size of a cluster that splits the depth.
_LISTS = ("split", "consumer", "tile")


def costs(op: str) -> dict[str, list[float]]:
    """The constants of a GEMM for sm_90a, by name, in the header's order."""
    names = *_NUMBERS, *_LISTS
    table = read_table(_FILE).only(*_STRUCTS).table(op).only(*names)
    found = {}
    for name in names:
        value = table.data.get(name)
        numbers = value if name in _LISTS else [value]
        if not isinstance(numbers, list) or not numbers or not all(map(_is_cost, numbers)):
            kind = "a list of positive numbers" if name in _LISTS else "a positive number"
            raise table.fail(name, f"got {value!r}", f"{kind} with a decimal point")
        found[name] = numbers
    return found


def _is_cost(value: object) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def body() -> str:
    """Return what is between the first lines of the header and the end of its namespace."""
    structs = "\n\n".join(_struct(op) for op in _STRUCTS)
    return f"""\
// The costs by which the GEMMs for sm_90a choose their tiles.
#pragma once

namespace precast {{

// Clocks, bytes per clock; the source explains each.
// clang-format off
{structs}
// clang-format on
"""


def _struct(op: str) -> str:
    name, what = _STRUCTS[op]
    lines = "\n".join(
        f"  double {name}[{len(numbers)}] = {{{', '.join(map(repr, numbers))}}};"
        if name in _LISTS
        else f"  double {name} = {numbers[0]!r};"
        for name, numbers in costs(op).items()
    )
    return f"// Of the {what}.\nstruct {name} {{\n{lines}\n}};"
