# SPDX-License-Identifier: Apache-2.0
"""The grouped e4m3 product by wgmma, for Hopper; formula and layouts: group_gemm_fp8.py.

Threads  one warp copies into a ring of stages; two warpgroups multiply 64 tokens each, and add the
         sum of each 128 of the depth to theirs in fp32, while the other one multiplies. CTAs of a
         cluster share the tokens: each copies a part of their rows to all.
Source   PTX ISA, wgmma and cp.async.bulk.tensor
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from precast.cute_dsl.common import fma
from precast.cute_dsl.group_tiles import BLOCK, CODES, INSTRUCTION, GroupTiles, wait_parity

WARPGROUP = 128  # threads
MULTIPLIERS = 2  # warpgroups
COPY_REGISTERS, MULTIPLY_REGISTERS = 40, 232


class GroupGemmSm90(GroupTiles):
    threads = (1 + MULTIPLIERS) * WARPGROUP

    @cute.jit
    def scales_at(
        self,
        a_scale: cute.Pointer,
        b_scale: cute.Pointer,
        a_scale_row: Int64,
        b_scale_group: Int64,
        b_scale_column: Int64,
        row: Int32,
        end: Int32,
        column: Int32,
        columns: Int32,
        group: Int32,
    ) -> tuple[cute.Pointer, cute.Pointer, cute.Pointer]:
        """Where the scales of a thread's two rows, which are 8 apart, and of the weight begin.

        Rows behind the last token, and columns behind the last, are not stored: they have the
        scales of the last ones.
        """
        upper, lower = cutlass.min(row, end - 1), cutlass.min(row + 8, end - 1)
        block = cutlass.min(column, columns - 1) // BLOCK
        of_columns = Int64(group) * b_scale_group + Int64(block) * b_scale_column
        return (
            a_scale + Int64(upper) * a_scale_row,
            a_scale + Int64(lower) * a_scale_row,
            b_scale + of_columns,
        )

    def instructions(self) -> cute.TiledMma:
        """wgmma of 64 tokens a warpgroup. Whether it adds is a part: each use makes its own."""
        op = warpgroup.MmaF8Op(
            *(CODES, CODES, Float32, (64, BLOCK, INSTRUCTION)),
            warpgroup.OperandSource.SMEM,
            *(warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.K),
        )
        return cute.make_tiled_mma(op, (MULTIPLIERS, 1, 1))

    @cute.jit
    def start(
        self,
        product: cute.Tensor,
        a_parts: cute.Tensor,
        b_parts: cute.Tensor,
        full: cute.Pointer,
        stage: Int32,
        phase: Int32,
    ) -> tuple[Int32, Int32]:
        """Wait for a stage, start its product, and return the next stage."""
        wait_parity(full + stage, phase)
        tiled_mma = self.instructions()
        warpgroup.fence()
        for k in cutlass.range_constexpr(BLOCK // INSTRUCTION):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, k > 0)
            at = (None, None, k, stage)
            cute.gemm(tiled_mma, product, a_parts[at], b_parts[at], product)
        warpgroup.commit_group()
        # Why: the compiler would load scales between two instructions, and the tensor cores would
        # wait. A warpgroup that issues all at once has them for itself while the other one adds.
        cute.arch.sync_warp()
        stage, phase = self.next_stage(stage, phase)
        return stage, phase

    @cute.jit
    def load_scales(
        self, scales: cute.Tensor, upper: cute.Pointer, lower: cute.Pointer, columns: cute.Pointer
    ) -> None:
        for i, source in enumerate((upper, lower, columns)):
            scales[i] = cute.make_tensor(source, 1)[0]

    @cute.jit
    def add(self, total: cute.Tensor, product: cute.Tensor, scales: cute.Tensor) -> None:
        """total += product, scaled."""
        of_rows = scales[0] * scales[2], scales[1] * scales[2]
        for i in cutlass.range_constexpr(cute.size(total)):
            total[i] = fma(of_rows[i // 2 % 2], product[i], total[i])

    @cute.jit
    def release(self, empty: cute.Pointer, lane: Int32) -> None:
        """Say that the warp has read a stage, to each CTA that copies to this one."""
        if lane < self.cluster:
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.mbarrier_arrive(empty, lane)
            else:
                cute.arch.mbarrier_arrive(empty)

    @cute.kernel
    def kernel(
        self,
        a_map: cute.CopyAtom,
        b_map: cute.CopyAtom,
        m_indptr: cute.Pointer,  # [groups + 1]
        a_scale: cute.Pointer,
        b_scale: cute.Pointer,
        out: cute.Pointer,  # [tokens, columns]
        a_scale_row: Int64,
        a_scale_depth: Int64,
        b_scale_group: Int64,
        b_scale_column: Int64,
        b_scale_depth: Int64,
        out_stride: Int64,
        tokens: Int32,
        columns: Int32,
        blocks: Int32,  # of the depth
        groups: Int32,
        stages: cute.ComposedLayout,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = Int32(0)
        if cutlass.const_expr(self.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        pairs = (columns + (BLOCK * self.cluster - 1)) // (BLOCK * self.cluster)

        smem = cutlass.memory.SmemAllocator()
        full = smem.allocate_array(Int64, self.stages, byte_alignment=8)
        empty = smem.allocate_array(Int64, self.stages, byte_alignment=8)
        a_stages = smem.allocate_tensor(
            CODES, stages.outer, byte_alignment=1024, swizzle=stages.inner
        )
        b_stages = smem.allocate_tensor(
            CODES, stages.outer, byte_alignment=1024, swizzle=stages.inner
        )
        if thread == 0:
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + stage, 1)
                # Each warp that multiplies, of all CTAs that a copy writes to.
                cute.arch.mbarrier_init(empty + stage, 4 * MULTIPLIERS * self.cluster)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        group, first, begin, end, tiles = Int32(0), Int32(0), Int32(0), Int32(0), Int32(1)
        stage, phase = Int32(0), Int32(0)
        tile = cta // self.cluster
        step = ctas // self.cluster

        if warp < 4:
            cute.arch.setmaxregister_decrease(COPY_REGISTERS)
            if warp == 0:
                self.copy_tiles(
                    *(a_map, b_map, m_indptr, full, empty, a_stages, b_stages),
                    *(tile, step, rank, tokens, columns, blocks, groups),
                )
        else:
            cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
            member = thread - WARPGROUP  # of those that multiply
            lane = thread % 32
            tiled_mma = self.instructions()
            part = tiled_mma.get_slice(member // WARPGROUP * WARPGROUP)
            a_parts = tiled_mma.make_fragment_A(part.partition_A(a_stages))
            b_parts = tiled_mma.make_fragment_B(part.partition_B(b_stages))
            shape = tiled_mma.partition_shape_C((BLOCK, BLOCK))
            even = cute.make_rmem_tensor(shape, Float32)
            odd = cute.make_rmem_tensor(shape, Float32)
            total = cute.make_rmem_tensor(shape, Float32)
            # Of the block that is multiplied: the scales of two rows, and of the weight.
            of_even = cute.make_rmem_tensor(3, Float32)
            of_odd = cute.make_rmem_tensor(3, Float32)
            # The rows of a thread are 8 apart, see the layout of wgmma's accumulator.
            row_of_thread = member // 32 * 16 + lane // 4

            group, first, begin, end, tiles = self.find(
                m_indptr, tile, group, first, tokens, pairs, groups
            )
            while group < groups:
                row, column = self.place(tile - first, begin, tiles, rank)
                row += row_of_thread
                upper, lower, of_columns = self.scales_at(
                    *(a_scale, b_scale, a_scale_row, b_scale_group, b_scale_column),
                    *(row, end, column, columns, group),
                )
                total.fill(0.0)
                # A warpgroup without tokens only gives the stages back.
                multiplied = blocks
                if row - row_of_thread % 64 >= end:
                    multiplied = Int32(0)
                multiplied = cute.arch.make_warp_uniform(multiplied)
                if multiplied > 0:
                    # Each block is multiplied while the one before is added.
                    last = stage
                    stage, phase = self.start(even, a_parts, b_parts, full, stage, phase)
                    self.load_scales(of_even, upper, lower, of_columns)
                    for _ in cutlass.range(0, (multiplied - 1) // 2, unroll=1):
                        middle = stage
                        stage, phase = self.start(odd, a_parts, b_parts, full, stage, phase)
                        upper += a_scale_depth
                        lower += a_scale_depth
                        of_columns += b_scale_depth
                        self.load_scales(of_odd, upper, lower, of_columns)
                        warpgroup.wait_group(1)
                        self.release(empty + last, lane)
                        self.add(total, even, of_even)
                        last = stage
                        stage, phase = self.start(even, a_parts, b_parts, full, stage, phase)
                        upper += a_scale_depth
                        lower += a_scale_depth
                        of_columns += b_scale_depth
                        self.load_scales(of_even, upper, lower, of_columns)
                        warpgroup.wait_group(1)
                        self.release(empty + middle, lane)
                        self.add(total, odd, of_odd)
                    if multiplied % 2 == 0:
                        middle = stage
                        stage, phase = self.start(odd, a_parts, b_parts, full, stage, phase)
                        upper += a_scale_depth
                        lower += a_scale_depth
                        of_columns += b_scale_depth
                        self.load_scales(of_odd, upper, lower, of_columns)
                        warpgroup.wait_group(1)
                        self.release(empty + last, lane)
                        self.add(total, even, of_even)
                        warpgroup.wait_group(0)
                        self.release(empty + middle, lane)
                        self.add(total, odd, of_odd)
                    else:
                        warpgroup.wait_group(0)
                        self.release(empty + last, lane)
                        self.add(total, even, of_even)
                for _ in cutlass.range(multiplied, blocks, unroll=1):
                    wait_parity(full + stage, phase)
                    self.release(empty + stage, lane)
                    stage, phase = self.next_stage(stage, phase)
                self.store(total, out, out_stride, row, column, end, columns, lane)
                tile += step
                group, first, begin, end, tiles = self.find(
                    m_indptr, tile, group, first, tokens, pairs, groups
                )
        if cutlass.const_expr(self.cluster > 1):
            # Shared memory of a CTA must stay until the others have written there.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def store(
        self,
        total: cute.Tensor,
        out: cute.Pointer,
        out_stride: Int64,
        row: Int32,
        column: Int32,
        end: Int32,
        columns: Int32,
        lane: Int32,
    ) -> None:
        """Round the sums of a thread and store those that exist.

        The accumulator of wgmma gives each of four neighbouring threads two of eight columns. They
        exchange four times eight, so that each stores eight columns, 16 bytes, of its own.
        """
        quarter = lane % 4
        words = cute.make_rmem_tensor(4, Uint32)
        for half in cutlass.range_constexpr(2):  # of the rows
            for part in cutlass.range_constexpr(BLOCK // 32):  # of the columns
                for i in cutlass.range_constexpr(4):
                    two = cute.make_rmem_tensor(2, self.dtype)
                    at = 4 * (4 * part + i) + 2 * half
                    two[0] = total[at].to(self.dtype)
                    two[1] = total[at + 1].to(self.dtype)
                    words[i] = cute.recast_tensor(two, Uint32)[0]
                for step in cutlass.range_constexpr(2):
                    bit = 1 << step
                    is_odd = quarter & bit != 0
                    for i in cutlass.range_constexpr(4):
                        if cutlass.const_expr(i & bit == 0):
                            low, high = words[i], words[i + bit]
                            sent = high
                            if is_odd:
                                sent = low
                            got = cute.arch.shuffle_sync_bfly(sent, bit)
                            if is_odd:
                                words[i] = got
                            else:
                                words[i + bit] = got
                to = column + 32 * part + 8 * quarter
                exists = row + 8 * half < end and to < columns
                if exists:
                    place = Int64(row + 8 * half) * out_stride + to
                    target = cute.make_tensor(out + cute.assume(place, divby=8), 8)
                    cute.autovec_copy(words, cute.recast_tensor(target, Uint32))
