# SPDX-License-Identifier: Apache-2.0
"""The end of a mixture of experts: each token adds up the rows of its experts, weighted.

::

    out[t, c] = round(sum_k weights[t, k] * input[rows[t, k], c])         fp32, in the order of k
    where rows[t, k] is from 0 to count - 1; others, such as -1, add nothing; with scale or bias
    input[r, c] * scale[e] + bias[e, c], e = row_experts[r], stands in the place of input[r, c]

Layouts, threads, traffic and source are those of the kernel in CUDA,
``include/precast/moe/moe_finalize.cuh``, and so are the results, bit for bit.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from precast.cute_dsl.common import DTYPES, divide, fma, pointer


class MoeFinalize:
    """One item of 8 columns a thread; the rows of four experts are loaded together."""

    def __init__(self, dtype: str, dtype_o: str, of_experts: bool) -> None:
        self.dtype, self.dtype_o = DTYPES[dtype], DTYPES[dtype_o]
        self.of_experts = of_experts  # whether there may be a scale or a bias, and no weights
        self.size = 8
        self.batch = 4
        self.threads = 256
        # Lets ptxas take registers for the rows of four experts, as in moe_finalize.cuh.
        self.ctas_per_sm = 1 if of_experts else 5

    @cute.jit
    def __call__(
        self,
        input: cute.Pointer,
        rows: cute.Pointer,
        weights: cute.Pointer,
        row_experts: cute.Pointer,
        scale: cute.Pointer,
        bias: cute.Pointer,
        out: cute.Pointer,
        input_stride: Int64,
        out_stride: Int64,
        columns: Int64,
        count: Int32,
        topk: Int32,
        experts: Int32,
        reciprocal: Int64,
        per_row: Int32,
        items: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(
            input,
            rows,
            weights,
            row_experts,
            scale,
            bias,
            out,
            input_stride,
            out_stride,
            columns,
            count,
            topk,
            experts,
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

    @cute.jit
    def scale_and_bias(
        self,
        x: cute.Tensor,
        expert: Int32,
        scale: cute.Pointer,
        bias: cute.Pointer,
        columns: Int64,
        column: Int64,
    ) -> None:
        """x * scale + bias of the expert of one row, in place; nothing for the expert -1."""
        if expert >= 0 and scale.toint() != 0:
            factor = cute.make_tensor(scale + expert, 1)[0]
            for i in cutlass.range_constexpr(self.size):
                x[i] = x[i] * factor
        if expert >= 0 and bias.toint() != 0:
            offset = cute.assume(Int64(expert) * columns + column, divby=self.size)
            loaded = cute.make_rmem_tensor(self.size, self.dtype_o)
            cute.autovec_copy(cute.make_tensor(bias + offset, self.size), loaded)
            added = loaded.load().to(Float32)
            for i in cutlass.range_constexpr(self.size):
                x[i] = x[i] + added[i]

    @cute.kernel
    def kernel(
        self,
        input: cute.Pointer,  # [count, columns]
        rows: cute.Pointer,  # [tokens, topk]
        weights: cute.Pointer,  # [tokens, topk], or null: 1
        row_experts: cute.Pointer,  # [count], or null without scale and bias
        scale: cute.Pointer,  # [experts], or null: 1
        bias: cute.Pointer,  # [experts, columns], or null
        out: cute.Pointer,  # [tokens, columns]
        input_stride: Int64,
        out_stride: Int64,
        columns: Int64,
        count: Int32,
        topk: Int32,
        experts: Int32,
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
                expert = cute.make_rmem_tensor(self.batch, Int32)  # -1: no scale, no bias
                loaded.fill(0.0)
                weight.fill(0.0)
                expert.fill(-1)
                for k in cutlass.range_constexpr(self.batch):
                    at = first + begin + k
                    row = Int32(-1)
                    if begin + k < topk:
                        row = cute.make_tensor(rows + at, 1)[0]
                    if Uint32(row) < Uint32(count):
                        if cutlass.const_expr(not self.of_experts):
                            weight[k] = cute.make_tensor(weights + at, 1)[0]
                        else:
                            weight[k] = Float32(1.0)
                            if weights.toint() != 0:
                                weight[k] = cute.make_tensor(weights + at, 1)[0]
                            if row_experts.toint() != 0:
                                of = cute.make_tensor(row_experts + row, 1)[0]
                                # A caller's number that is no expert must not fault.
                                expert[k] = Int32(0)
                                if Uint32(of) < Uint32(experts):
                                    expert[k] = of
                        offset = cute.assume(row * input_stride + column, divby=self.size)
                        source = cute.make_tensor(input + offset, self.size)
                        cute.autovec_copy(source, loaded[None, k])
                for k in cutlass.range_constexpr(self.batch):
                    x = loaded[None, k].load().to(Float32)
                    if cutlass.const_expr(self.of_experts):
                        y = cute.make_rmem_tensor(self.size, Float32)
                        y.store(x)
                        self.scale_and_bias(y, expert[k], scale, bias, columns, column)
                        x = y.load()
                    for i in cutlass.range_constexpr(self.size):
                        total[i] = fma(weight[k], x[i], total[i])
            rounded = cute.make_rmem_tensor(self.size, self.dtype_o)
            rounded.store(total.load().to(self.dtype_o))
            offset = cute.assume(Int64(token) * out_stride + column, divby=self.size)
            cute.autovec_copy(rounded, cute.make_tensor(out + offset, self.size))


def kernels(dtype: str, dtype_o: str) -> dict[str, tuple[object, tuple[object, ...]]]:
    """What a module is compiled from: kernels by name, each with arguments of the right types."""
    arguments = (
        pointer(DTYPES[dtype], 16),
        pointer(Int32, 4),
        pointer(Float32, 4),
        pointer(Int32, 4),
        pointer(Float32, 4),
        pointer(DTYPES[dtype_o], 16),
        pointer(DTYPES[dtype_o], 16),
        *(Int64(0) for _ in range(3)),
        *(Int32(0) for _ in range(3)),
        Int64(0),
        *(Int32(0) for _ in range(3)),
    )
    return {
        "moe_finalize": (MoeFinalize(dtype, dtype_o, False), arguments),
        "moe_finalize_of_experts": (MoeFinalize(dtype, dtype_o, True), arguments),
    }
