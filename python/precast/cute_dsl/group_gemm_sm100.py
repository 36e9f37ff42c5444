# SPDX-License-Identifier: Apache-2.0
"""The grouped e4m3 product by tcgen05, for Blackwell; formula and layouts: group_gemm_fp8.py.

Threads  one warp copies into a ring of stages, as on Hopper, and one multiplies: each 128 of the
         depth into one of two accumulators in tensor memory. Four warps add these, scaled, to sums
         in registers: a thread has a token.
Source   PTX ISA, tcgen05.mma and tcgen05.ld
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from precast.cute_dsl.common import fma
from precast.cute_dsl.group_tiles import BLOCK, CODES, INSTRUCTION, GroupTiles, wait_parity

SUMMING_WARPS, COPY_WARP, MULTIPLY_WARP = 4, 4, 5
ACCUMULATORS = 2
PART = 32  # columns that a thread loads at once


@cute.jit
def order_before_barrier() -> None:
    """What follows a barrier must not overtake accesses to tensor memory before it."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


@cute.jit
def order_after_barrier() -> None:
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


class GroupGemmSm100(GroupTiles):
    threads = 32 * (SUMMING_WARPS + 2)

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
        ready = smem.allocate_array(Int64, ACCUMULATORS, byte_alignment=8)
        added = smem.allocate_array(Int64, ACCUMULATORS, byte_alignment=8)
        holder = smem.allocate_array(Int32, 1, byte_alignment=8)
        a_stages, b_stages = (
            smem.allocate_tensor(CODES, stages.outer, byte_alignment=1024, swizzle=stages.inner)
            for _ in range(2)
        )
        if thread == 0:
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + stage, 1)
                # The warp that multiplies, of all CTAs that a copy writes to.
                cute.arch.mbarrier_init(empty + stage, self.cluster)
            for i in cutlass.range_constexpr(ACCUMULATORS):
                cute.arch.mbarrier_init(ready + i, 1)
                cute.arch.mbarrier_init(added + i, SUMMING_WARPS)
        cute.arch.mbarrier_init_fence()
        if warp == MULTIPLY_WARP:
            cute.arch.alloc_tmem(ACCUMULATORS * BLOCK, holder)
            cute.arch.relinquish_tmem_alloc_permit()
        order_before_barrier()
        cute.arch.sync_threads()
        order_after_barrier()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        op = tcgen05.MmaF8F6F4Op(
            *(CODES, CODES, Float32, (BLOCK, BLOCK, INSTRUCTION), tcgen05.CtaGroup.ONE),
            *(tcgen05.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K),
        )
        tiled_mma = cute.make_tiled_mma(op)
        memory = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        shape = tiled_mma.partition_shape_C((BLOCK, BLOCK))
        accumulators = tiled_mma.make_fragment_C(cute.append(shape, ACCUMULATORS))
        accumulators = cute.make_tensor(memory, accumulators.layout)

        group, first, begin, end, tiles = Int32(0), Int32(0), Int32(0), Int32(0), Int32(1)
        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(0)  # the accumulator, and how often it was used
        tile = cta // self.cluster
        step = ctas // self.cluster

        if warp == COPY_WARP:
            self.copy_tiles(
                *(a_map, b_map, m_indptr, full, empty, a_stages, b_stages),
                *(tile, step, rank, tokens, columns, blocks, groups),
            )
        elif warp == MULTIPLY_WARP:
            kind = tcgen05.SmemLayoutAtomKind.K_SW128
            atom = tcgen05.make_smem_layout_atom(kind, CODES)
            tile_shape = (BLOCK, BLOCK, BLOCK)
            of_a = tiled_mma.partition_shape_A(cute.dice(tile_shape, (1, None, 1)))
            of_b = tiled_mma.partition_shape_B(cute.dice(tile_shape, (None, 1, 1)))
            # The same memory, as the instruction takes it.
            of_a, of_b = (
                tcgen05.tile_to_mma_shape(
                    atom, cute.append(shape, self.stages), order=(1, 2, 3)
                ).outer
                for shape in (of_a, of_b)
            )
            a_parts = tiled_mma.make_fragment_A(cute.make_tensor(a_stages.iterator, of_a))
            b_parts = tiled_mma.make_fragment_B(cute.make_tensor(b_stages.iterator, of_b))
            group, first, begin, end, tiles = self.find(
                m_indptr, tile, group, first, tokens, pairs, groups
            )
            while group < groups:
                for _ in cutlass.range(0, blocks, unroll=1):
                    wait_parity(added + slot, slot_phase ^ 1)
                    wait_parity(full + stage, phase)
                    order_after_barrier()
                    product = accumulators[(None, None, None, slot)]
                    for k in cutlass.range_constexpr(BLOCK // INSTRUCTION):
                        tiled_mma.set(tcgen05.Field.ACCUMULATE, k > 0)
                        at = (None, None, k, stage)
                        cute.gemm(tiled_mma, product, a_parts[at], b_parts[at], product)
                    with cute.arch.elect_one():
                        if cutlass.const_expr(self.cluster > 1):
                            tcgen05.commit(empty + stage, (1 << self.cluster) - 1)
                        else:
                            tcgen05.commit(empty + stage)
                        tcgen05.commit(ready + slot)
                    stage, phase = self.next_stage(stage, phase)
                    slot += 1
                    if slot == ACCUMULATORS:
                        slot = Int32(0)
                        slot_phase ^= 1
                tile += step
                group, first, begin, end, tiles = self.find(
                    m_indptr, tile, group, first, tokens, pairs, groups
                )
        else:
            load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(PART)), Float32)
            whole = accumulators[((None, None), 0, 0, None)]  # [128, 128, accumulators]
            parts = cute.flat_divide(whole, (BLOCK, PART))  # [128, 32, 1, 4, accumulators]
            copy = tcgen05.make_tmem_copy(load, parts[(None, None, 0, 0, 0)])
            copy = copy.get_slice(thread)
            sources = copy.partition_S(parts)
            loaded = cute.make_rmem_tensor(
                copy.partition_D(cute.make_identity_tensor((BLOCK, PART))).shape, Float32
            )
            total = cute.make_rmem_tensor(BLOCK, Float32)
            group, first, begin, end, tiles = self.find(
                m_indptr, tile, group, first, tokens, pairs, groups
            )
            while group < groups:
                row, column = self.place(tile - first, begin, tiles, rank)
                row += thread
                # Rows behind the last token, and columns behind the last, are not stored.
                of_row = a_scale + Int64(cutlass.min(row, end - 1)) * a_scale_row
                block_of_columns = cutlass.min(column, columns - 1) // BLOCK
                of_columns = Int64(group) * b_scale_group
                of_columns += Int64(block_of_columns) * b_scale_column
                total.fill(0.0)
                for block in cutlass.range(0, blocks, unroll=1):
                    along_a, along_b = Int64(block) * a_scale_depth, Int64(block) * b_scale_depth
                    scale = cute.make_tensor(of_row + along_a, 1)[0]
                    scale *= cute.make_tensor(b_scale + of_columns + along_b, 1)[0]
                    wait_parity(ready + slot, slot_phase)
                    order_after_barrier()
                    for part in cutlass.range_constexpr(BLOCK // PART):
                        cute.copy(copy, sources[(None, None, None, 0, part, slot)], loaded)
                        cute.arch.fence_view_async_tmem_load()
                        for i in cutlass.range_constexpr(PART):
                            at = PART * part + i
                            total[at] = fma(scale, loaded[i], total[at])
                    order_before_barrier()
                    cute.arch.sync_warp()
                    if thread % 32 == 0:
                        cute.arch.mbarrier_arrive(added + slot)
                    slot += 1
                    if slot == ACCUMULATORS:
                        slot = Int32(0)
                        slot_phase ^= 1
                for i in cutlass.range_constexpr(BLOCK // 8):
                    to = column + 8 * i
                    exists = row < end and to < columns
                    if exists:
                        rounded = cute.make_rmem_tensor(8, self.dtype)
                        for j in cutlass.range_constexpr(8):
                            rounded[j] = total[8 * i + j].to(self.dtype)
                        offset = cute.assume(Int64(row) * out_stride + to, divby=8)
                        cute.autovec_copy(rounded, cute.make_tensor(out + offset, 8))
                tile += step
                group, first, begin, end, tiles = self.find(
                    m_indptr, tile, group, first, tokens, pairs, groups
                )
        order_before_barrier()
        cute.arch.sync_threads()
        order_after_barrier()
        if cutlass.const_expr(self.cluster > 1):
            # Shared memory of a CTA must stay until the others have written there.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp == MULTIPLY_WARP:
            cute.arch.dealloc_tmem(memory, ACCUMULATORS * BLOCK)
