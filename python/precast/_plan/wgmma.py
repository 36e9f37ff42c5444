# SPDX-License-Identifier: Apache-2.0
"""The header of the wgmma instructions that kernels use.

An instruction names every register of its accumulator, so each shape is a text of its own. Source:
the PTX ISA, "Asynchronous warpgroup-level matrix instructions".
"""

from __future__ import annotations

#: This file, for the header.
SOURCE = "python/precast/_plan/wgmma.py"
_Forms = dict[tuple[str, str], tuple[int, ...]]
_FORMS_16: _Forms = {
    ("new", "ss"): (64, 128),
    ("add", "ss"): (16, 32, 48, 64, 80, 128, 160, 176, 192, 256),
    ("add", "rs"): (64, 96, 128, 256),
}
# Weights of MXFP4 are unpacked to bf16 in registers.
_FORMS_BF16: _Forms = {**_FORMS_16, ("add", "rs"): (32, 64, 96, 128, 256)}
# The few columns are for GEMMs of few rows, which are the columns of the transposed product. Eight
# more than 64 or 128 are those of a column that attention adds to V.
_FORMS_8: _Forms = {
    ("new", "ss"): (8, 16, 32, 48, 64, 80, 96, 128, 160, 176, 192, 256),
    ("add", "ss"): (8, 16, 32, 48, 64, 80, 96, 128, 160, 176, 192, 256),
    ("either", "ss"): (128,),
    ("new", "rs"): (8, 64, 72, 128, 136, 256),
    ("add", "rs"): (8, 64, 72, 128, 136, 256),
}
#: Columns of D, by the element type of A and B (its name is also that of PTX), by whether the
#: product is added to D ("add"), D is new ("new"), or that depends ("either"), and by where A is:
#: in shared memory ("ss") or in registers ("rs").
COLUMNS: dict[str, _Forms] = {
    "f16": _FORMS_16,
    "bf16": _FORMS_BF16,
    "e4m3": _FORMS_8,
}
#: The k of one instruction, which are 32 bytes of A and B.
DEPTH: dict[str, int] = {"f16": 16, "bf16": 16, "e4m3": 32}

_PER_LINE = 8


def body() -> str:
    """Return what is between the first lines of the header and the end of its namespace."""
    structs = "\n\n".join(
        _struct(name, columns)
        for columns in sorted(
            {n for forms in COLUMNS.values() for row in forms.values() for n in row}
        )
        for name in COLUMNS
        if any(columns in row for row in COLUMNS[name].values())
    )
    return f"""\
// The wgmma instructions in use: D[64, N] = A[64, k] B[k, N] (new), or added to D (add). The k of
// an instruction are 32 bytes: 16 elements of 16 bits, or 32 of 8 bits.
//
// A is in shared memory (ss), or in registers (rs), B is in shared memory. What lies in shared
// memory is contiguous along k, or along M or N with kTransposedA and kTransposedB, which 8 bits
// lack. The four warps of a warpgroup call each function together. Why not one function for both:
// a D that is read need not be there before, and its registers may hold something else until then.
// Where these are too few for that, a third one (either) keeps D in the same.
//
// Registers   of lane l of warp w, with q = l % 4
//   D         d[4 j + 2 h + i] is column 8 j + 2 q + i of row 16 w + l / 4 + 8 h; h and i are 0, 1.
//   A         a[2 g + h] is bytes 16 g + 4 q .. 16 g + 4 q + 3 of row 16 w + l / 4 + 8 h; g and h
//             are 0, 1. These are two columns of 16 bits or four of 8 bits, the first one lowest.
//   D as A    In 16 bits, d[8 s ..] of 16 columns are the A of step s: both have the columns
//             8 g + 2 q and the next. In 8 bits a lane has two columns of every 8 in D, but four of
//             every 16 in A. No exchange is needed if k is counted in another order in A and B:
//             k = 16 g + 4 q + i stands for column 16 g + 8 (i / 2) + 2 q + i % 2, with i = 0 .. 3.
//
// Precision   D is f32. In 8 bits the tensor cores align what an instruction adds, its products
//             and D, to the largest of it, and keep about 14 bits. So long sums are added up from
//             new Ds of a few instructions each (DeepSeek-V3, arXiv:2412.19437, section 3.5.2).
#pragma once

#include "precast/core/fp8.cuh"

namespace precast {{

#if defined(__CUDACC__)

template <typename T, int kColumns>
struct Wgmma;

// clang-format off
{structs}
// clang-format on

#endif  // __CUDACC__
"""


def _struct(name: str, columns: int) -> str:
    forms = [form for form, row in COLUMNS[name].items() if columns in row]
    functions = "\n\n".join(_function(name, *form, columns) for form in forms)
    return f"template <>\nstruct Wgmma<{name}, {columns}> {{\n{functions}\n}};"


def _function(dtype: str, how: str, form: str, columns: int) -> str:
    count = columns // 2
    a_count = 1 if form == "ss" else 4
    a, b = count, count + a_count
    argument = "uint64_t a" if form == "ss" else "const uint32_t (&a)[4]"
    registers = _string([f"%{i}" for i in range(count)])
    operand_a = f"%{a}" if form == "ss" else "{%" + ", %".join(map(str, range(a, b))) + "}"
    can_transpose = DEPTH[dtype] == 16
    template, transposes, check, transposed = "bool kTransposedB", "", "", ""
    if can_transpose:
        transposes = f", %{b + 1}"
        transposed = ', "n"(kTransposedB ? 1 : 0)'
        if form == "ss":
            template += ", bool kTransposedA = false"
            transposes = f", %{b + 1}, %{b + 2}"
            transposed = ', "n"(kTransposedA ? 1 : 0)' + transposed
    else:
        check = '    static_assert(!kTransposedB, "B of 8 bits is contiguous along k");\n'
    adds, parameter, predicate = str(int(how == "add")), "", ""
    if how == "either":
        assert not can_transpose  # no kernel needs it
        adds = f"%{b + 1}"
        parameter, predicate = ", bool adds", ', "r"(adds ? 1 : 0)'
    constraint = '"=f"' if how == "new" else '"+f"'
    outputs = ",\n".join(
        f"        {row}" for row in _rows([f"{constraint}(d[{i}])" for i in range(count)])
    )
    inputs = '"l"(a)' if form == "ss" else ", ".join(f'"r"(a[{i}])' for i in range(4))
    name = f"{how}_{form}"
    parameters = f"float (&d)[{count}], {argument}, uint64_t b{parameter}"
    shape = f"m64n{columns}k{DEPTH[dtype]}.f32.{dtype}.{dtype}"
    return f"""\
  template <{template}>
  static __device__ __forceinline__ void {name}({parameters}) {{
{check}    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.u32 p, {adds}, 0;\\n"
        "wgmma.mma_async.sync.aligned.{shape} "
{registers}
        "{operand_a}, %{b}, p, 1, 1{transposes};\\n}}"
        :
{outputs}
        : {inputs}, "l"(b){transposed}{predicate});
  }}"""


def _rows(items: list[str]) -> list[str]:
    """Join items with commas, some to a line."""
    return [", ".join(items[i : i + _PER_LINE]) for i in range(0, len(items), _PER_LINE)]


def _string(items: list[str]) -> str:
    """Return the lines of a string literal that holds the items in braces."""
    text = ", \n".join(_rows(items))
    return "\n".join(f'        "{line}"' for line in ("{" + text + "}, ").splitlines())
