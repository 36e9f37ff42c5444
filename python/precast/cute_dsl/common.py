# SPDX-License-Identifier: Apache-2.0
"""What kernels share: element types, division into items, arguments to compile with."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64
from cutlass.cute.runtime import make_ptr

#: By the words of axes.
DTYPES = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16}


@cute.jit
def divide(number: Uint32, reciprocal: Int64) -> Uint32:
    """``number`` by the divisor of a ``FastDivmod`` (core/rows.cuh)."""
    quotient = cute.arch.inline_ptx(
        "mul.hi.u64 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint64],
        read_only_args=[Uint64(number), Uint64(reciprocal)],
    ).to(Uint32)
    if reciprocal == 0:  # stands for the divisor 1
        quotient = number
    return quotient


@cute.jit
def load_vector(source: cute.Pointer, target: cute.Tensor, evict_last: Boolean) -> None:
    """16 bytes to registers; L2 keeps them longest if asked to, as core/vec.cuh explains."""
    first, normal = (
        cute.arch.inline_ptx(
            f"createpolicy.fractional.L2::{kind}.b64 {{$w0}}, 1.0;", write_only_types=[Uint64]
        )
        for kind in ("evict_last", "evict_normal")
    )
    policy = normal
    if evict_last:
        policy = first
    loaded = cute.arch.inline_ptx(
        "ld.global.L2::cache_hint.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}], {$r1};",
        write_only_types=[Int32] * 4,
        read_only_args=[source, policy],
    )
    words = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(4):
        words[i] = loaded[i]


@cute.jit
def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c with one rounding."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def pointer(dtype: type, alignment: int) -> cute.Pointer:
    """A pointer to global memory, as an example of its type; ``alignment`` is in bytes."""
    return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=alignment)
