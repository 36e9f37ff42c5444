// SPDX-License-Identifier: Apache-2.0
// The epilogue of an MLA work tile: a warp has 16 kRowTiles rows and kWarpDimV columns of acc_o.
//
//   out = acc_o / row_sum * out_scale      lse = row_max + log2(row_sum)
//
// A tile that is not split is written to the output, a split of a tile to the split workspace, from
// where attention/combine.cuh combines the splits.
#pragma once

#include "precast/attention/combine.cuh"
#include "precast/mla/params.cuh"
#include "precast/mla/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

// The part of acc_o that a warp has.
template <typename Tile>
struct MlaOutputPart {
  static __device__ __forceinline__ int first_row() {
    return threadIdx.x / 32 / kMlaColumnWarps * (16 * Tile::kRowTiles);
  }
  static __device__ __forceinline__ int column_warp() { return threadIdx.x / 32 % kMlaColumnWarps; }
  static __device__ __forceinline__ int first_column() { return column_warp() * Tile::kWarpDimV; }
  static __device__ __forceinline__ int row_of_lane(int m, int half) {
    return first_row() + m * 16 + half * 8 + threadIdx.x % 32 / 4;
  }
};

// acc_o with the statistics of its rows.
template <typename Tile>
struct MlaAccumulators {
  float acc_o[Tile::kRowTiles][Tile::kWarpDimV / 8][4] = {};
  float row_max[Tile::kRowTiles][2];
  float row_sum[Tile::kRowTiles][2];

  __device__ __forceinline__ void rescale_row(int m, int half, float factor) {
#pragma unroll
    for (int n = 0; n < Tile::kWarpDimV / 8; ++n) {
      acc_o[m][n][2 * half] *= factor;
      acc_o[m][n][2 * half + 1] *= factor;
    }
  }
};

// Writes a row of acc_o times `factor`. The four lanes of the row exchange pairs of columns, so
// that each stores 8 bytes and all of them 32 bytes in a row. All lanes call it.
template <typename Tile, typename Q>
__device__ __forceinline__ void write_mla_row(const float (&acc_o)[Tile::kWarpDimV / 8][4],
                                              int half, float factor, bool exists, Q* out) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < Tile::kWarpDimV / 16; ++c) {
    const float* even = acc_o[2 * c] + 2 * half;
    const float* odd = acc_o[2 * c + 1] + 2 * half;
    uint2 bits;
    int column = 16 * c;
    if constexpr (Tile::kFp8) {
      column += 4 * q;
      bits.x = pack_pair(Q(), even[0] * factor, odd[0] * factor);
      bits.y = pack_pair(Q(), even[1] * factor, odd[1] * factor);
    } else {
      const uint32_t low = pack_pair(Q(), even[0] * factor, even[1] * factor);
      const uint32_t high = pack_pair(Q(), odd[0] * factor, odd[1] * factor);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, q % 2 ? low : high, 1);
      column += q % 2 * 8 + q / 2 * 4;
      bits = q % 2 ? make_uint2(other, high) : make_uint2(low, other);
    }
    if (exists) *reinterpret_cast<uint2*>(out + column) = bits;
  }
}

// Writes the output of a tile that is not split.
template <typename Tile, typename Q>
__device__ __forceinline__ void write_mla_output(const MlaParams& p, const BlockInfo& block,
                                                 const MlaAccumulators<Tile>& acc) {
  using Part = MlaOutputPart<Tile>;
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Part::row_of_lane(m, half);
      const bool exists = row < block.num_rows;
      const PackGqaRow packed(p, block, exists ? row : 0);
      const RowResult result(p, packed.q_head, acc.row_max[m][half], acc.row_sum[m][half]);
      Q* const out = output_row<Q>(p, block, packed) + Part::first_column();
      write_mla_row<Tile, Q>(acc.acc_o[m], half, result.factor, exists, out);
      if (exists && Part::column_warp() == 0 && threadIdx.x % 4 == 0) {
        write_lse(p, block, packed, result.lse);
      }
    }
  }
}

// Writes the partial result of a split.
template <typename Tile>
__device__ __forceinline__ void write_mla_partial(const MlaParams& p, const BlockInfo& block,
                                                  const MlaAccumulators<Tile>& acc) {
  using Part = MlaOutputPart<Tile>;
  const PartialResult target = partial_result<Tile>(p, block.work);
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Part::row_of_lane(m, half);
      if (row >= block.num_rows) continue;
      for_each_column_pair<Tile>(acc.acc_o[m], half, [&](int column, float x, float y) {
        const int offset = PartialResult::offset<Tile>(row, Part::first_column() + column);
        *reinterpret_cast<float2*>(target.acc_o + offset) = make_float2(x, y);
      });
      if (Part::column_warp() == 0 && threadIdx.x % 4 == 0) {
        target.row_stats[row] = make_float2(acc.row_max[m][half], acc.row_sum[m][half]);
      }
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
