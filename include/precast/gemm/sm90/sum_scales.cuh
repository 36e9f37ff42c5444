// SPDX-License-Identifier: Apache-2.0
// The scales of rows of the operands, by which the epilogue of GEMM for sm_90a multiplies sums:
//
//   sum * (alpha * a_scale[t] * b_scale[n])
//
// A lane has two rows of a tile, and a few columns of each group of columns, whose scales it reads
// when it writes them. One number for all columns is part of the rows' factors. While the sums are
// computed, no register is free for scales: they wait in L1.
#pragma once

#include "precast/core/prefetch.cuh"
#include "precast/gemm/sm90/scheduler.cuh"

namespace precast {

#if defined(__CUDACC__)

template <typename Tile, typename Params, bool kHasScales = Params::kHasScales>
class SumScales {
 public:
  static __device__ __forceinline__ void prefetch(const Params&, const GemmTile&) {}
  SumScales() = default;
  __device__ __forceinline__ SumScales(const Params&, const GemmTile&, int) {}
};

template <typename Tile, typename Params>
class SumScales<Tile, Params, true> {
 public:
  // Brings the scales of a tile, and its bias, to L1. All lanes of a warp call it.
  static __device__ __forceinline__ void prefetch(const Params& params, const GemmTile& tile) {
    const GemmParams& p = params.p;
    const int further = threadIdx.x % 32 * kPrefetched;
    const int token = tile.token + further, column = tile.column + further;
    const int columns = min(tile.column + Tile::kWeights, p.columns);
    prefetch_scale(p.a_scale, tile.a_group, token, min(tile.token + Tile::kTokens, tile.token_end));
    prefetch_scale(p.b_scale, tile.b_group, column, columns);
    if (p.bias != nullptr && column < columns) {
      prefetch_to_l1(static_cast<const typename Params::Bias*>(p.bias) + column);
    }
  }

  // `row` is the lane's first row of the tile; the other one is eight below.
  __device__ __forceinline__ SumScales(const Params& params, const GemmTile& tile, int row)
      : p_(params.p), tile_(tile) {
    float factor = p_.alpha == nullptr ? 1.0f : *p_.alpha;
    const float* const of_columns = columns();
    if (of_columns != nullptr && column_stride() == 0) factor *= *of_columns;
    const RowScales& rows = Tile::kSwapped ? p_.b_scale : p_.a_scale;
    const int group = Tile::kSwapped ? tile.b_group : tile.a_group;
    const int first = Tile::kSwapped ? tile.column : tile.token;
    const int last = (Tile::kSwapped ? p_.columns : tile.token_end) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_row_[half] = factor;
      if (rows.data == nullptr) continue;
      const int here = min(first + row + 8 * half, last);  // what lies behind is not written
      of_row_[half] *= rows.data[group * rows.group_stride + here * rows.row_stride];
    }
  }

  // Multiplies the pairs of a group of columns, which begin at `column` of the tile: pair 2 j + h
  // is that of columns 8 j + 2 q and the next, in row h.
  template <int kPairs>
  __device__ __forceinline__ void multiply(int column, float2 (&pairs)[kPairs]) const {
    const float* const of_columns = columns();
    const bool differ = of_columns != nullptr && column_stride() != 0;
    const int first = (Tile::kSwapped ? tile_.token : tile_.column) + column + threadIdx.x % 4 * 2;
    const int last = (Tile::kSwapped ? tile_.token_end : p_.columns) - 1;
#pragma unroll
    for (int j = 0; j < kPairs / 2; ++j) {
      float2 of_column = make_float2(1.0f, 1.0f);
      if (differ) {
        of_column.x = of_columns[min(first + 8 * j, last) * column_stride()];
        of_column.y = of_columns[min(first + 8 * j + 1, last) * column_stride()];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2& pair = pairs[2 * j + half];
        pair.x *= of_row_[half] * of_column.x;
        pair.y *= of_row_[half] * of_column.y;
      }
    }
  }

 private:
  static constexpr int kPrefetched = 8;  // floats, 32 bytes
  static_assert(Tile::kTokens <= 32 * kPrefetched && Tile::kWeights <= 32 * kPrefetched, "lanes");

  static __device__ __forceinline__ void prefetch_scale(const RowScales& scales, int group, int row,
                                                        int end) {
    if (scales.data == nullptr || row >= end) return;
    prefetch_to_l1(scales.data + group * scales.group_stride + row * scales.row_stride);
  }

  // The scales of the tile's columns, or null.
  __device__ __forceinline__ const float* columns() const {
    const RowScales& scales = Tile::kSwapped ? p_.a_scale : p_.b_scale;
    if (scales.data == nullptr) return nullptr;
    return scales.data + (Tile::kSwapped ? tile_.a_group : tile_.b_group) * scales.group_stride;
  }
  __device__ __forceinline__ int64_t column_stride() const {
    return Tile::kSwapped ? p_.a_scale.row_stride : p_.b_scale.row_stride;
  }

  const GemmParams& p_;
  const GemmTile& tile_;
  float of_row_[2];
};

#endif  // __CUDACC__

}  // namespace precast
