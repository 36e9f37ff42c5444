# SPDX-License-Identifier: Apache-2.0
"""Groups of e4m3 tokens times a weight each, with scales of blocks, for Hopper.

::

    out[t, n] = round(sum_i a_scale[t, i] * b_scale[g, n / 128, i] *
                      sum_{k in block i} a[t, k] * b[g, n, k])             fp32, in the order of i
    for the tokens t from m_indptr[g] to m_indptr[g + 1] - 1; others are not written

Layouts  a [tokens, depth], b [groups, columns, depth]: e4m3 codes as bytes, read by TMA through the
         maps that the binding encodes, in boxes of 128 of the depth with swizzle; what lies outside
         reads as zeros. Scales fp32 at any strides, out 16-bit with rows at 16 bytes.
Tiles    128 tokens of one group x 128 columns; tiles are numbered group by group, tokens first, so
         that CTAs that run together share the weight in L2. A tile may end in the tokens of another
         group: rows do not mix, and these are not stored.
Threads  one warp copies into a ring of stages; two warpgroups multiply 64 tokens each, and add the
         sum of each 128 of the depth to theirs in fp32, while the other one multiplies. CTAs of a
         cluster share the tokens: each copies a part of their rows to all.
Source   DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3 (the sum of each
         128 of the depth in fp32); PTX ISA, wgmma and cp.async.bulk.tensor
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from precast.cute_dsl.common import DTYPES, fma, pointer

CODES = cutlass.Float8E4M3FN
BLOCK = 128  # tokens, columns and depth of a tile
INSTRUCTION = 32  # depth of a wgmma
WARPGROUP = 128  # threads
SHARED_BYTES = 227 * 1024  # what a CTA may have


class GroupGemm:
    """A CTA computes one tile after another; a cluster those of neighbouring columns."""

    def __init__(self, dtype: str, cluster: int) -> None:
        self.dtype = DTYPES[dtype]
        self.cluster = cluster
        self.multipliers = 2  # warpgroups
        self.threads = (1 + self.multipliers) * WARPGROUP
        self.stage_bytes = 2 * BLOCK * BLOCK
        self.stages = (SHARED_BYTES - 1024) // self.stage_bytes
        self.shared_bytes = 1024 + self.stages * self.stage_bytes
        self.copy_registers, self.multiply_registers = 40, 232

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        m_indptr: cute.Pointer,
        a_scale: cute.Pointer,
        b_scale: cute.Pointer,
        out: cute.Pointer,
        a_scale_row: Int64,
        a_scale_depth: Int64,
        b_scale_group: Int64,
        b_scale_column: Int64,
        b_scale_depth: Int64,
        out_stride: Int64,
        tokens: Int32,
        columns: Int32,
        blocks: Int32,
        groups: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        # Only the types of the maps matter: a module encodes them itself.
        row = cute.assume(Int64(blocks) * BLOCK, divby=16)
        of_a = cute.make_tensor(a, cute.make_layout((tokens, blocks * BLOCK), stride=(row, 1)))
        weights = cute.make_layout(
            (columns, blocks * BLOCK, groups),
            stride=(row, 1, cute.assume(row * columns, divby=16)),
        )
        of_b = cute.make_tensor(b, weights)
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, CODES)
        stages = cute.tile_to_shape(atom, (BLOCK, BLOCK, self.stages), order=(0, 1, 2))
        one = cute.slice_(stages, (None, None, 0))
        copy = cpasync.CopyBulkTensorTileG2SOp()
        shared_copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else copy
        a_map, _ = cpasync.make_tiled_tma_atom(
            shared_copy, of_a, one, (BLOCK, BLOCK), num_multicast=self.cluster
        )
        b_map, _ = cpasync.make_tiled_tma_atom(copy, of_b, one, (BLOCK, BLOCK))
        self.kernel(
            a_map,
            b_map,
            m_indptr,
            a_scale,
            b_scale,
            out,
            a_scale_row,
            a_scale_depth,
            b_scale_group,
            b_scale_column,
            b_scale_depth,
            out_stride,
            tokens,
            columns,
            blocks,
            groups,
            stages,
        ).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            smem=self.shared_bytes,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,  # without one, CuTe DSL asks a GPU
        )

    @cute.jit
    def find(
        self,
        m_indptr: cute.Pointer,
        tile: Int32,
        group: Int32,
        first: Int32,
        tokens: Int32,
        pairs: Int32,
        groups: Int32,
    ) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """The group of a tile, its first tile, and its tokens: begin, end and tiles of them.

        ``tile`` must not be less than ``first``, the first tile of ``group``. The group is that
        behind the last one if there is no such tile.
        """
        starts = cute.make_tensor(m_indptr, groups + 1)
        begin, end, tiles = Int32(0), Int32(0), Int32(1)
        searching = group < groups
        while searching:
            begin, end = starts[group], starts[group + 1]
            if begin < 0:
                begin = Int32(0)
            if end > tokens:
                end = tokens
            tiles = Int32(0)
            if end > begin:
                tiles = (end - begin + (BLOCK - 1)) // BLOCK
            if tile - first < tiles * pairs:
                searching = Boolean(False)
            else:
                first += tiles * pairs
                group += 1
                searching = group < groups
        return group, first, begin, end, tiles

    @cute.jit
    def place(self, number: Int32, begin: Int32, tiles: Int32, rank: Int32) -> tuple[Int32, Int32]:
        """The first token and column of a tile by its number in the group."""
        row = begin + number % tiles * BLOCK
        column = (number // tiles * self.cluster + rank) * BLOCK
        return row, column

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
                cute.arch.mbarrier_init(empty + stage, 4 * self.multipliers * self.cluster)
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
            cute.arch.setmaxregister_decrease(self.copy_registers)
            if warp == 0:
                cpasync.prefetch_descriptor(a_map)
                cpasync.prefetch_descriptor(b_map)
                a_at = cute.make_tensor(
                    cute.make_identity_tensor((blocks * BLOCK, tokens)).iterator,
                    cute.make_layout((tokens, blocks * BLOCK), stride=(cute.E(1), cute.E(0))),
                )
                group, first, begin, end, tiles = self.find(
                    m_indptr, tile, group, first, tokens, pairs, groups
                )
                while group < groups:
                    row, column = self.place(tile - first, begin, tiles, rank)
                    # Coordinates of this tile: tokens need not begin at a multiple of it.
                    a_tile = cute.domain_offset((row, 0), a_at)
                    a_tile = cute.local_tile(a_tile, (BLOCK, BLOCK), (0, None))
                    b_at = cute.make_tensor(
                        cute.make_identity_tensor((blocks * BLOCK, columns, groups)).iterator,
                        cute.make_layout(
                            (columns, blocks * BLOCK, groups),
                            stride=(cute.E(1), cute.E(0), cute.E(2)),
                        ),
                    )
                    b_tile = cute.domain_offset((column, 0, group), b_at)
                    b_tile = cute.local_tile(b_tile[(None, None, 0)], (BLOCK, BLOCK), (0, None))
                    a_to, a_from = cpasync.tma_partition(
                        a_map,
                        rank,
                        cute.make_layout(self.cluster),
                        cute.group_modes(a_stages, 0, 2),
                        cute.group_modes(a_tile, 0, 2),
                    )
                    b_to, b_from = cpasync.tma_partition(
                        b_map,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(b_stages, 0, 2),
                        cute.group_modes(b_tile, 0, 2),
                    )
                    for block in cutlass.range(0, blocks, unroll=1):
                        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
                        if cutlass.const_expr(self.cluster > 1):
                            cute.copy(
                                a_map,
                                a_from[(None, block)],
                                a_to[(None, stage)],
                                tma_bar_ptr=full + stage,
                                mcast_mask=cutlass.Int16((1 << self.cluster) - 1),
                            )
                        else:
                            cute.copy(
                                a_map,
                                a_from[(None, block)],
                                a_to[(None, stage)],
                                tma_bar_ptr=full + stage,
                            )
                        cute.copy(
                            b_map,
                            b_from[(None, block)],
                            b_to[(None, stage)],
                            tma_bar_ptr=full + stage,
                        )
                        stage += 1
                        if stage == self.stages:
                            stage = Int32(0)
                            phase ^= 1
                    tile += step
                    group, first, begin, end, tiles = self.find(
                        m_indptr, tile, group, first, tokens, pairs, groups
                    )
        else:
            cute.arch.setmaxregister_increase(self.multiply_registers)
            member = thread - WARPGROUP  # of those that multiply
            lane = thread % 32
            op = warpgroup.MmaF8Op(
                *(CODES, CODES, Float32, (64, BLOCK, INSTRUCTION)),
                warpgroup.OperandSource.SMEM,
                *(warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.K),
            )
            tiled_mma = cute.make_tiled_mma(op, (self.multipliers, 1, 1))
            part = tiled_mma.get_slice(member // WARPGROUP * WARPGROUP)
            a_parts = tiled_mma.make_fragment_A(part.partition_A(a_stages))
            b_parts = tiled_mma.make_fragment_B(part.partition_B(b_stages))
            shape = tiled_mma.partition_shape_C((BLOCK, BLOCK))
            product = cute.make_rmem_tensor(shape, Float32)
            total = cute.make_rmem_tensor(shape, Float32)
            scales = cute.make_rmem_tensor(2, Float32)  # of two rows, times that of the weight
            ahead = cute.make_rmem_tensor(3, Float32)  # of the next block: two rows, the weight
            # The rows of a thread are 8 apart, see the layout of wgmma's accumulator.
            row_of_thread = member // 32 * 16 + lane // 4

            group, first, begin, end, tiles = self.find(
                m_indptr, tile, group, first, tokens, pairs, groups
            )
            row, column = Int32(0), Int32(0)
            a_upper, a_lower, of_columns = a_scale, a_scale, b_scale
            if group < groups:
                row, column = self.place(tile - first, begin, tiles, rank)
                row += row_of_thread
                a_upper, a_lower, of_columns = self.scales_at(
                    *(a_scale, b_scale, a_scale_row, b_scale_group, b_scale_column),
                    *(row, end, column, columns, group),
                )
                ahead[0] = cute.make_tensor(a_upper, 1)[0]
                ahead[1] = cute.make_tensor(a_lower, 1)[0]
                ahead[2] = cute.make_tensor(of_columns, 1)[0]
            while group < groups:
                total.fill(0.0)
                for block in cutlass.range(0, blocks, unroll=1):
                    scales[0] = ahead[0] * ahead[2]
                    scales[1] = ahead[1] * ahead[2]
                    cute.arch.mbarrier_wait(full + stage, phase)
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(BLOCK // INSTRUCTION):
                        tiled_mma.set(warpgroup.Field.ACCUMULATE, k > 0)
                        at = (None, None, k, stage)
                        cute.gemm(tiled_mma, product, a_parts[at], b_parts[at], product)
                    warpgroup.commit_group()
                    if block + 1 < blocks:
                        along_a = Int64(block + 1) * a_scale_depth
                        along_b = Int64(block + 1) * b_scale_depth
                        ahead[0] = cute.make_tensor(a_upper + along_a, 1)[0]
                        ahead[1] = cute.make_tensor(a_lower + along_a, 1)[0]
                        ahead[2] = cute.make_tensor(of_columns + along_b, 1)[0]
                    warpgroup.wait_group(0)
                    # Every warp says for itself, to each CTA that copies to this one, that it has
                    # read the stage.
                    if lane < self.cluster:
                        if cutlass.const_expr(self.cluster > 1):
                            cute.arch.mbarrier_arrive(empty + stage, lane)
                        else:
                            cute.arch.mbarrier_arrive(empty + stage)
                    for i in cutlass.range_constexpr(cute.size(shape)):
                        total[i] = fma(scales[i // 2 % 2], product[i], total[i])
                    stage += 1
                    if stage == self.stages:
                        stage = Int32(0)
                        phase ^= 1
                # The first scales of the next tile are on their way while this one is stored.
                done_row, done_column, done_end = row, column, end
                tile += step
                group, first, begin, end, tiles = self.find(
                    m_indptr, tile, group, first, tokens, pairs, groups
                )
                if group < groups:
                    row, column = self.place(tile - first, begin, tiles, rank)
                    row += row_of_thread
                    a_upper, a_lower, of_columns = self.scales_at(
                        *(a_scale, b_scale, a_scale_row, b_scale_group, b_scale_column),
                        *(row, end, column, columns, group),
                    )
                    ahead[0] = cute.make_tensor(a_upper, 1)[0]
                    ahead[1] = cute.make_tensor(a_lower, 1)[0]
                    ahead[2] = cute.make_tensor(of_columns, 1)[0]
                self.store(total, out, out_stride, done_row, done_column, done_end, columns, lane)
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


def kernels(dtype_o: str) -> dict[str, tuple[object, ...]]:
    """What a module is compiled from: kernels by name, arguments, attributes of the launch."""
    arguments = (
        pointer(CODES, 16),
        pointer(CODES, 16),
        pointer(Int32, 4),
        pointer(Float32, 4),
        pointer(Float32, 4),
        pointer(DTYPES[dtype_o], 16),
        *(Int64(0) for _ in range(6)),
        *(Int32(0) for _ in range(5)),
    )
    made = {}
    for cluster in (1, 2):
        kernel = GroupGemm(dtype_o, cluster)
        launch = {"shared_bytes": kernel.shared_bytes, "cluster": cluster}
        made[f"group_gemm_fp8_of_{cluster}"] = kernel, arguments, launch
    return made
