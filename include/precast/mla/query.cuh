// SPDX-License-Identifier: Apache-2.0
// Q of an MLA tile: the copy of q_nope and q_pe from global to shared memory as one row of each
// (token, head), its conversion for caches of 8 bits, and its fragments as operands of the scores.
#pragma once

#include "precast/attention/query.cuh"
#include "precast/mla/params.cuh"
#include "precast/mla/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// Starts the copies of kChunks chunks of 16 bytes of this warp's rows, behind kFirstChunk others.
template <typename Tile, int kChunks, int kFirstChunk>
__device__ __forceinline__ void copy_mla_columns(const MlaParams& p, const BlockInfo& block,
                                                 uint32_t smem_q, const void* q, int64_t stride,
                                                 int64_t head_stride) {
  constexpr int kRows = Tile::kBlockM / Tile::kWarps;
  static_assert(kRows * kChunks % 32 == 0, "all lanes take part in each round");
  const int first = threadIdx.x / 32 * kRows;
  const RowOffsets offsets(p, block, first, kRows, stride, head_stride);
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < kRows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const uint32_t offset = offsets.of(row);
    const bool exists = offset != RowOffsets::kNoRow;
    cp_async(smem_q + Tile::QueryRows::offset(first + row, kFirstChunk + chunk),
             static_cast<const uint4*>(q) + (exists ? offset + chunk : 0u), exists);
  }
}

// Starts the copies of Q and commits them as one group. Rows that do not exist become zeros.
template <typename Tile>
__device__ __forceinline__ void copy_mla_q(const MlaParams& p, const BlockInfo& block,
                                           uint32_t smem_q) {
  constexpr int kCkvChunks = Tile::kDimV / 8;
  copy_mla_columns<Tile, kCkvChunks, 0>(p, block, smem_q, p.q, p.q_stride, p.q_head_stride);
  if constexpr (Tile::kDimK > 0) {
    copy_mla_columns<Tile, Tile::kDimK / 8, kCkvChunks>(p, block, smem_q, p.q_pe, p.q_pe_stride,
                                                        p.q_pe_head_stride);
  }
  cp_async_commit_group();
}

// Converts Q in shared memory to f16 in the order of columns that MMAs with e4m3 need, as
// permute_q_columns() says. All threads of the CTA call it between two barriers.
template <typename Tile, typename Q>
__device__ __forceinline__ void permute_mla_q(unsigned char* smem_q) {
  constexpr int kGroups = (Tile::kDimV + Tile::kDimK) / 16;
  for (int i = threadIdx.x; i < Tile::kBlockM * kGroups; i += Tile::kThreads) {
    const int row = i / kGroups, chunk = i % kGroups * 2;
    uint4* low = reinterpret_cast<uint4*>(smem_q + Tile::QueryRows::offset(row, chunk));
    uint4* high = reinterpret_cast<uint4*>(smem_q + Tile::QueryRows::offset(row, chunk + 1));
    uint4 x = *low, y = *high;
    permute_q_columns<Q>(x, y);
    *low = x;
    *high = y;
  }
}

// The A operands of 16 rows of Q, from k step kFirstStep of a row on.
template <typename Tile, int kFirstStep>
struct MlaQFragments {
  uint32_t smem_rows;    // of the first row
  uint32_t lane_offset;  // rows_first<QueryRows>()

  __device__ __forceinline__ void load(uint32_t (&a)[1][4], int step) const {
    ldmatrix_x4(a[0], smem_rows + Tile::QueryRows::later(lane_offset, 2 * (kFirstStep + step)));
  }
};

#endif  // __CUDACC__

}  // namespace precast
