# SPDX-License-Identifier: Apache-2.0
"""The end of a mixture of experts: each token adds up the rows of its experts, weighted.

::

    out[t, c] = round(sum_k weights[t, k] * rows[indices[t, k], c])       fp32, in the order of k
    where indices[t, k] is from 0 to count - 1; others, such as -1, add nothing

Layouts, threads, traffic and source are those of the kernel in CUDA,
``include/precast/moe/moe_finalize.cuh``, and so are the results, bit for bit.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from precast.cute_dsl.common import DTYPES, divide, pointer


@cute.jit
def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c with one rounding."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


class MoeFinalize:
    """One item of 8 columns a thread; the rows of four experts are loaded together."""

    def __init__(self, dtype: str) -> None:
        self.dtype = DTYPES[dtype]
        self.size = 8
        self.batch = 4
        self.threads = 256
        # Lets ptxas take registers for the rows of four experts, as in moe_finalize.cuh.
        self.ctas_per_sm = 5

    @cute.jit
    def __call__(
        self,
        rows: cute.Pointer,
        indices: cute.Pointer,
        weights: cute.Pointer,
        out: cute.Pointer,
        row_stride: Int64,
        out_stride: Int64,
        count: Int32,
        topk: Int32,
        reciprocal: Int64,
        per_row: Int32,
        items: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(
            rows,
            indices,
            weights,
            out,
            row_stride,
            out_stride,
            count,
            topk,
            reciprocal,
            per_row,
            items,
        ).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=0,  # without one, CuTe DSL asks a GPU
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Pointer,  # [count, columns]
        indices: cute.Pointer,  # [tokens, topk]
        weights: cute.Pointer,  # [tokens, topk]
        out: cute.Pointer,  # [tokens, columns]
        row_stride: Int64,
        out_stride: Int64,
        count: Int32,
        topk: Int32,
        reciprocal: Int64,  # of per_row
        per_row: Int32,  # items of a row
        items: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        item = Uint32(cta) * Uint32(self.threads) + Uint32(thread)
        cute.arch.griddepcontrol_launch_dependents()
        if item < Uint32(items):
            token = divide(item, reciprocal)
            column = Int64(item - token * Uint32(per_row)) * self.size
            first = Int64(token) * topk
            cute.arch.griddepcontrol_wait()

            total = cute.make_rmem_tensor(self.size, Float32)
            total.fill(0.0)
            for begin in cutlass.range(0, topk, self.batch, unroll=1):
                loaded = cute.make_rmem_tensor((self.size, self.batch), self.dtype)
                weight = cute.make_rmem_tensor(self.batch, Float32)
                loaded.fill(0.0)
                weight.fill(0.0)
                for k in cutlass.range_constexpr(self.batch):
                    at = first + begin + k
                    index = Int32(-1)
                    if begin + k < topk:
                        index = cute.make_tensor(indices + at, 1)[0]
                    if Uint32(index) < Uint32(count):
                        weight[k] = cute.make_tensor(weights + at, 1)[0]
                        offset = cute.assume(index * row_stride + column, divby=self.size)
                        source = cute.make_tensor(rows + offset, self.size)
                        cute.autovec_copy(source, loaded[None, k])
                for k in cutlass.range_constexpr(self.batch):
                    x = loaded[None, k].load().to(Float32)
                    for i in cutlass.range_constexpr(self.size):
                        total[i] = fma(weight[k], x[i], total[i])
            rounded = cute.make_rmem_tensor(self.size, self.dtype)
            rounded.store(total.load().to(self.dtype))
            offset = cute.assume(Int64(token) * out_stride + column, divby=self.size)
            cute.autovec_copy(rounded, cute.make_tensor(out + offset, self.size))


def kernels(dtype: str) -> dict[str, tuple[object, tuple[object, ...]]]:
    """What a module is compiled from: kernels by name, each with arguments of the right types."""
    arguments = (
        pointer(DTYPES[dtype], 16),
        pointer(Int32, 4),
        pointer(Float32, 4),
        pointer(DTYPES[dtype], 16),
        *(Int64(0) for _ in range(2)),
        *(Int32(0) for _ in range(2)),
        Int64(0),
        *(Int32(0) for _ in range(3)),
    )
    return {"moe_finalize": (MoeFinalize(dtype), arguments)}
