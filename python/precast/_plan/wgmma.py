# SPDX-License-Identifier: Apache-2.0
"""The header of the wgmma instructions that kernels use.

An instruction names every register of its accumulator, so each shape is a text of its own. Source:
the PTX ISA, "Asynchronous warpgroup-level matrix instructions".
"""

from __future__ import annotations

#: This file, for the header.
SOURCE = "python/precast/_plan/wgmma.py"
#: Columns of D, by where A is, in shared memory ("ss") or in registers ("rs"), and by whether the
#: product is added to D ("add") or D is new ("new").
COLUMNS: dict[tuple[str, str], tuple[int, ...]] = {
    ("new", "ss"): (64, 128),
    ("add", "ss"): (64, 128),
    ("add", "rs"): (64, 128, 256),
}
#: Element types of A and B, and their names in PTX.
TYPES: dict[str, str] = {"f16": "f16", "bf16": "bf16"}

_PER_LINE = 8


def body() -> str:
    """Return what is between the first lines of the header and the end of its namespace."""
    structs = "\n\n".join(
        _struct(name, ptx, columns)
        for columns in sorted({n for row in COLUMNS.values() for n in row})
        for name, ptx in TYPES.items()
    )
    return f"""\
// The wgmma instructions in use: D[64, N] = A[64, 16] B[16, N] (new), or added to D (add).
//
// A is in shared memory with its columns contiguous (ss), or in registers (rs). B is in shared
// memory: its rows are contiguous along k, or along N with kTransposedB. The four warps of a
// warpgroup call each function together. Why not one function for both: a D that is read need not
// be there before, and its registers may hold something else until then.
#pragma once

#include "precast/core/types.cuh"

namespace precast {{

#if defined(__CUDACC__)

template <typename T, int kColumns>
struct Wgmma;

// clang-format off
{structs}
// clang-format on

#endif  // __CUDACC__
"""


def _struct(name: str, ptx: str, columns: int) -> str:
    forms = [_function(*form, ptx, columns) for form in COLUMNS if columns in COLUMNS[form]]
    return f"template <>\nstruct Wgmma<{name}, {columns}> {{\n" + "\n\n".join(forms) + "\n};"


def _function(how: str, form: str, ptx: str, columns: int) -> str:
    count = columns // 2
    a_count = 1 if form == "ss" else 4
    a, b = count, count + a_count
    argument = "uint64_t a" if form == "ss" else "const uint32_t (&a)[4]"
    registers = _string([f"%{i}" for i in range(count)])
    operand_a = f"%{a}" if form == "ss" else "{%" + ", %".join(map(str, range(a, b))) + "}"
    transposes = f"0, %{b + 1}" if form == "ss" else f"%{b + 1}"
    constraint = '"=f"' if how == "new" else '"+f"'
    outputs = ",\n".join(
        f"        {row}" for row in _rows([f"{constraint}(d[{i}])" for i in range(count)])
    )
    inputs = '"l"(a)' if form == "ss" else ", ".join(f'"r"(a[{i}])' for i in range(4))
    name = f"{how}_{form}"
    return f"""\
  template <bool kTransposedB>
  static __device__ __forceinline__ void {name}(float (&d)[{count}], {argument}, uint64_t b) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.u32 p, {int(how == "add")}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{ptx}.{ptx} "
{registers}
        "{operand_a}, %{b}, p, 1, 1, {transposes};\\n}}"
        :
{outputs}
        : {inputs}, "l"(b), "n"(kTransposedB ? 1 : 0));
  }}"""


def _rows(items: list[str]) -> list[str]:
    """Join items with commas, some to a line."""
    return [", ".join(items[i : i + _PER_LINE]) for i in range(0, len(items), _PER_LINE)]


def _string(items: list[str]) -> str:
    """Return the lines of a string literal that holds the items in braces."""
    text = ", \n".join(_rows(items))
    return "\n".join(f'        "{line}"' for line in ("{" + text + "}, ").splitlines())
