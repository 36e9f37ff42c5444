# SPDX-License-Identifier: Apache-2.0
"""What the grouped e4m3 products of all GPUs share: how they are launched, and the order of tiles.

A tile has 128 tokens of one group and 128 columns. Tiles are numbered group by group, tokens first,
so that CTAs that run together share the weight in L2. A cluster computes those of neighbouring
columns. A tile may end in the tokens of another group: rows do not mix, and these are not stored.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from precast.cute_dsl.common import DTYPES

CODES = cutlass.Float8E4M3FN
BLOCK = 128  # tokens, columns and depth of a tile
INSTRUCTION = 32  # depth of one instruction of the tensor cores
SHARED_BYTES = 227 * 1024  # what a CTA may have


@cute.jit
def wait_parity(barrier: cute.Pointer, parity: Int32) -> None:
    """Wait for a phase of an mbarrier. CuTe DSL's function lets the warp sleep."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; "
        "@!done bra again; }",
        read_only_args=[barrier, parity],
    )


class GroupTiles:
    """A CTA computes one tile after another; a subclass has the kernel."""

    threads: int
    kernel: Any
    barrier_bytes = 1024  # of the shared memory before the stages

    def __init__(self, dtype: str, cluster: int) -> None:
        self.dtype = DTYPES[dtype]
        self.cluster = cluster
        self.stage_bytes = 2 * BLOCK * BLOCK
        self.stages = (SHARED_BYTES - self.barrier_bytes) // self.stage_bytes
        self.shared_bytes = self.barrier_bytes + self.stages * self.stage_bytes

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
    def next_stage(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def copy_tiles(
        self,
        a_map: cute.CopyAtom,
        b_map: cute.CopyAtom,
        m_indptr: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        a_stages: cute.Tensor,  # [128, 128, stages]
        b_stages: cute.Tensor,
        tile: Int32,
        step: Int32,
        rank: Int32,  # of the CTA in its cluster
        tokens: Int32,
        columns: Int32,
        blocks: Int32,
        groups: Int32,
    ) -> None:
        """Copy the operands of all tiles of this CTA into the ring of stages; one warp calls it."""
        pairs = (columns + (BLOCK * self.cluster - 1)) // (BLOCK * self.cluster)
        group, first, begin, _end, tiles = Int32(0), Int32(0), Int32(0), Int32(0), Int32(1)
        stage, phase = Int32(0), Int32(0)
        cpasync.prefetch_descriptor(a_map)
        cpasync.prefetch_descriptor(b_map)
        a_at = cute.make_tensor(
            cute.make_identity_tensor((blocks * BLOCK, tokens)).iterator,
            cute.make_layout((tokens, blocks * BLOCK), stride=(cute.E(1), cute.E(0))),
        )
        group, first, begin, _end, tiles = self.find(
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
                wait_parity(empty + stage, phase ^ 1)
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
                stage, phase = self.next_stage(stage, phase)
            tile += step
            group, first, begin, _end, tiles = self.find(
                m_indptr, tile, group, first, tokens, pairs, groups
            )
        # The CTAs of a cluster say when they have read a stage also after the last copy, and shared
        # memory must stay until then.
        for _ in cutlass.range_constexpr(self.stages):
            wait_parity(empty + stage, phase ^ 1)
            stage, phase = self.next_stage(stage, phase)
