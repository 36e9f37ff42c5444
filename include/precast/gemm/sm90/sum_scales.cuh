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
  __device__ __forceinline__ SumScales(const Params& params, const GemmTile& tile, int row) {
    const GemmParams& p = params.p;
    const RowScales& rows = Tile::kSwapped ? p.b_scale : p.a_scale;
    const RowScales& columns = Tile::kSwapped ? p.a_scale : p.b_scale;
    const int token = tile.token, column = tile.column;
    const int row_group = Tile::kSwapped ? tile.b_group : tile.a_group;
    const int column_group = Tile::kSwapped ? tile.a_group : tile.b_group;
    float factor = p.alpha == nullptr ? 1.0f : *p.alpha;
    if (columns.data != nullptr) {
      const int first = (Tile::kSwapped ? token : column) + threadIdx.x % 4 * 2;
      stride_ = columns.row_stride;
      of_columns_ = columns.data + column_group * columns.group_stride + first * stride_;
      if (stride_ == 0) {
        factor *= *of_columns_;
      } else {
        columns_left_ = (Tile::kSwapped ? tile.token_end : p.columns) - first;
      }
    }
    const int first = Tile::kSwapped ? column : token;
    const int last = (Tile::kSwapped ? p.columns : tile.token_end) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_row_[half] = factor;
      if (rows.data == nullptr) continue;
      const int here = min(first + row + 8 * half, last);  // what lies behind is not written
      of_row_[half] *= rows.data[row_group * rows.group_stride + here * rows.row_stride];
    }
  }

  // Multiplies the pairs of a group of columns, which begin at `column` of the tile: pair 2 j + h
  // is that of columns 8 j + 2 q and the next, in row h.
  template <int kPairs>
  __device__ __forceinline__ void multiply(int column, float2 (&pairs)[kPairs]) const {
    // Why steps: an address of 64 bits for each column, by a product, takes more instructions than
    // the multiplications.
    const float* from = of_columns_ + column * stride_;
#pragma unroll
    for (int j = 0; j < kPairs / 2; ++j, from += 8 * stride_) {
      float2 of_column = make_float2(1.0f, 1.0f);  // what lies behind is not written
      if (column + 8 * j < columns_left_) of_column.x = from[0];
      if (column + 8 * j + 1 < columns_left_) of_column.y = from[stride_];
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

  // The scale of the lane's first column, how far apart those of two columns are, and how many
  // columns from there on have one of their own.
  const float* of_columns_ = nullptr;
  int64_t stride_ = 0;
  int columns_left_ = 0;
  float of_row_[2];
};

#endif  // __CUDACC__

}  // namespace precast
