// SPDX-License-Identifier: Apache-2.0
// The epilogue of a work tile for sm_90a: attention/epilogue.cuh says what is computed.
#pragma once

#include "precast/attention/epilogue.cuh"
#include "precast/attention/sm90/pipeline.cuh"
#include "precast/attention/sm90/softmax.cuh"
#include "precast/core/warp.cuh"

namespace precast {

#if defined(__CUDACC__)

// The row of the tile that a consumer lane holds. Where a tile has fewer rows than consumers have
// threads for, each of them holds all rows.
template <typename Tile>
__device__ __forceinline__ int sm90_row(int half) {
  int thread = Tile::thread();
  if constexpr (Tile::kThreads > 2 * Tile::kBlockM) thread %= 2 * Tile::kBlockM;
  return thread / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
}

// The terms of the heads of both rows of a lane. Asked for before the last product, they have come
// when the output is written.
template <typename Tile>
struct Sm90HeadTerms {
  HeadTerms of_half[2];

  Sm90HeadTerms() = default;
  __device__ __forceinline__ Sm90HeadTerms(const AttentionParams& p, const BlockInfo& block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = sm90_row<Tile>(half);
      of_half[half] = HeadTerms(p, PackGqaRow(p, block, row < block.num_rows ? row : 0).q_head);
    }
  }
};

// Writes the output of a tile that is not split, from column `first_column` on. A lane exchanges
// words with the others of its row, so that it stores 16 bytes at once.
template <typename Tile, int kCount>
__device__ __forceinline__ void sm90_write_output(const AttentionParams& p, const BlockInfo& block,
                                                  const RowStatistics& rows,
                                                  const float (&acc_o)[kCount],
                                                  const Sm90HeadTerms<Tile>& heads,
                                                  int first_column = 0) {
  using T = typename Tile::Query;
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = sm90_row<Tile>(half);
    const bool exists = row < block.num_rows;
    const PackGqaRow packed(p, block, exists ? row : 0);
    const RowResult result(p, heads.of_half[half], rows.row_max[half], rows.row_sum[half]);
    if (q == 0 && exists && first_column == 0) write_lse(p, block, packed, result.lse);
    T* const out = output_row<T>(p, block, packed) + first_column + 8 * q;
#pragma unroll
    for (int group = 0; group < kCount / 16; ++group) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const pair = acc_o + (4 * group + j) * 4 + 2 * half;
        words[j] = pack_pair(T(), pair[0] * result.factor, pair[1] * result.factor);
      }
      transpose_in_quad(words);
      store_if(exists, reinterpret_cast<uint4*>(out + 32 * group),
               make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

// Writes the partial result of a split, from column `first_column` on.
template <typename Tile, int kCount>
__device__ __forceinline__ void sm90_write_partial(const AttentionParams& p, const BlockInfo& block,
                                                   const RowStatistics& rows,
                                                   const float (&acc_o)[kCount],
                                                   int first_column = 0) {
  const PartialResult target = partial_result<Tile>(p, block.work);
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = sm90_row<Tile>(half);
    if (row >= block.num_rows) continue;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      // Why so: there are four offsets then, for whatever number of columns.
      const int offset =
          PartialResult::offset<Tile>(row, first_column + 8 * (j % 4) + 2 * q) + j / 4 * 32;
      *reinterpret_cast<float2*>(target.acc_o + offset) =
          make_float2(acc_o[4 * j + 2 * half], acc_o[4 * j + 2 * half + 1]);
    }
    if (q == 0 && first_column == 0)
      target.row_stats[row] = make_float2(rows.row_max[half], rows.row_sum[half]);
  }
}

#endif  // __CUDACC__

}  // namespace precast
