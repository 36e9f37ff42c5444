# SPDX-License-Identifier: Apache-2.0
"""SwiGLU between the two grouped products of an FP8 mixture of experts, requantised to e4m3.

::

    h[r, c]         = silu(input[r, gate + c]) * input[r, up + c]
    out_scale[g, r] = max(max_{c in g} |h[r, c]|, eps) / 448
    out[r, c]       = round(h[r, c] * (1 / out_scale[c / 128, r]))

Layouts, threads, traffic, source and every rounding are those of the kernel in CUDA for this
function and output, ``include/precast/moe/moe_activation.cuh``, and so are the results, bit for
bit. Codes travel as bytes.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32

from precast.cute_dsl.common import DTYPES, divide, load_vector, pointer

GROUP = 128
LARGEST = 448.0
LOG2_E = 1.4426950408889634


@cute.jit
def silu(x: Float32) -> Float32:
    """x / (1 + exp(-x)) with the fast exponential and division, as core/math.cuh has it."""
    power = cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};",
        write_only_types=[Float32],
        read_only_args=[x * Float32(-LOG2_E)],
    )
    return x * cute.arch.rcp_approx(power + Float32(1.0))


@cute.jit
def to_codes(low: Float32, high: Float32) -> Uint16:
    """Two e4m3 codes, rounded to nearest even and saturated."""
    return cute.arch.inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint16],
        read_only_args=[high, low],
    )


class MoeActivation:
    """One item of 8 columns a thread; 16 threads share a group."""

    def __init__(self, dtype: str) -> None:
        self.dtype = DTYPES[dtype]
        self.size = 8
        self.lanes = GROUP // self.size
        self.threads = 256

    @cute.jit
    def __call__(
        self,
        input: cute.Pointer,
        row_experts: cute.Pointer,
        rows_end: cute.Pointer,
        out: cute.Pointer,
        scales: cute.Pointer,
        input_stride: Int64,
        out_stride: Int64,
        scale_stride: Int64,
        gate: Int64,
        up: Int64,
        reciprocal: Int64,
        per_row: Int32,
        items: Int32,
        eps: Float32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(
            input,
            row_experts,
            rows_end,
            out,
            scales,
            input_stride,
            out_stride,
            scale_stride,
            gate,
            up,
            reciprocal,
            per_row,
            items,
            eps,
        ).launch(grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        input: cute.Pointer,  # [rows, 2 * columns]
        row_experts: cute.Pointer,  # [rows], or null
        rows_end: cute.Pointer,  # the rows that there are, or null
        out: cute.Pointer,  # [rows, columns]
        scales: cute.Pointer,  # [columns / 128, rows]
        input_stride: Int64,
        out_stride: Int64,
        scale_stride: Int64,
        gate: Int64,
        up: Int64,
        reciprocal: Int64,  # of per_row
        per_row: Int32,  # items of a row
        items: Int32,
        eps: Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        item = Uint32(cta) * Uint32(self.threads) + Uint32(thread)
        exists = item < Uint32(items)
        if not exists:
            item = Uint32(0)
        row = divide(item, reciprocal)
        column = Int64(item - row * Uint32(per_row)) * self.size
        row = Int64(row)
        begin = cute.assume(row * input_stride + column, divby=self.size)

        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        # All lanes of a group have one row. Those without work still take part in the shuffles.
        valid = exists
        if exists and rows_end.toint() != 0:
            valid = row < Int64(cute.make_tensor(rows_end, 1)[0])
        if valid and row_experts.toint() != 0:
            valid = cute.make_tensor(row_experts + row, 1)[0] >= 0
        loaded = cute.make_rmem_tensor((self.size, 2), self.dtype)  # gate and up
        h = cute.make_rmem_tensor(self.size, Float32)
        amax = Float32(0.0)
        if valid:
            # Marking lines evict_last pays off where every row is read.
            every = row_experts.toint() == 0 and rows_end.toint() == 0
            halves = (cute.assume(half, divby=self.size) for half in (gate, up))
            for number, half in enumerate(halves):
                load_vector(input + begin + half, loaded[None, number], every)
            gates = loaded[None, 0].load().to(Float32)
            ups = loaded[None, 1].load().to(Float32)
            for i in cutlass.range_constexpr(self.size):
                h[i] = silu(gates[i]) * ups[i]
                amax = cute.arch.fmax(cute.arch.fmax(amax, h[i], nan=True), -h[i], nan=True)
        for power in cutlass.range_constexpr(4):
            other = cute.arch.shuffle_sync_bfly(amax, 8 >> power)
            amax = cute.arch.fmax(amax, other, nan=True)
        if valid:
            scale = cute.arch.inline_ptx(
                "div.rn.f32 {$w0}, {$r0}, {$r1};",
                write_only_types=[Float32],
                read_only_args=[cute.arch.fmax(amax, eps, nan=True), Float32(LARGEST)],
            )
            inverse = cute.arch.inline_ptx(
                "rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[scale]
            )
            codes = cute.make_rmem_tensor(self.size // 2, Uint16)
            for i in cutlass.range_constexpr(self.size // 2):
                codes[i] = to_codes(h[2 * i] * inverse, h[2 * i + 1] * inverse)
            at = cute.assume(row * out_stride + column, divby=self.size)
            target = cute.recast_tensor(cute.make_tensor(out + at, self.size), Uint16)
            cute.autovec_copy(codes, target)
            if thread % self.lanes == 0:
                group = column // GROUP
                cute.make_tensor(scales + group * scale_stride + row, 1)[0] = scale


def kernels(dtype: str) -> dict[str, tuple[object, tuple[object, ...]]]:
    """What a module is compiled from: kernels by name, each with arguments of the right types."""
    arguments = (
        pointer(DTYPES[dtype], 16),
        pointer(Int32, 4),
        pointer(Int32, 4),
        pointer(Uint8, 8),
        pointer(Float32, 4),
        *(Int64(0) for _ in range(6)),
        *(Int32(0) for _ in range(2)),
        Float32(0.0),
        Int32(0),
    )
    return {"moe_activation": (MoeActivation(dtype), arguments)}
