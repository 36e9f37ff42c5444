// SPDX-License-Identifier: Apache-2.0
// Queries for keys of e4m3, in attention for sm_90a: consumers turn them, in shared memory, into
// numbers that wgmma multiplies with keys. Each row is first multiplied by a power of two by which
// its largest number comes near the largest of the type; the scale of its scores takes it back.
//
//   f16    for keys that are converted to f16: a number that becomes 0 is 2^-32 of the largest
//   e4m3   for keys that stay e4m3: q = high + low, both rounded to e4m3, and so
//
//            Q K^T = low K^T + high K^T                  in the same accumulator
//
//          A bf16 number has eight significant bits. e4m3 has four, the remainder is at most half
//          of the last of them, and so it is a multiple of its 1/16 of at most 8 in magnitude: four
//          bits again. So the sum is exact, for numbers down to 2^-9 of the row's largest; smaller
//          ones lose what is below 2^-17 of it.
//
// Layout   32 bf16 numbers of a row, 64 bytes, become 32 high ones and then 32 low ones: each of
// them
//          are what one wgmma reads of a row.
// Threads  Four lanes share a row. What a lane writes replaces what it has read.
#pragma once

#include "precast/attention/sm90/epilogue.cuh"
#include "precast/attention/sm90/rotary.cuh"

namespace precast {

#if defined(__CUDACC__)

// The power of two which makes `largest` at least 2^kExponent and less than twice as large, and its
// inverse.
template <int kExponent>
struct PowerOfTwo {
  float factor, inverse;

  __device__ __forceinline__ explicit PowerOfTwo(float largest) {
    const int exponent = max(-100, static_cast<int>(__float_as_uint(largest) >> 23) - 127);
    factor = __uint_as_float(uint32_t(127 + kExponent - exponent) << 23);
    inverse = __uint_as_float(uint32_t(127 - kExponent + exponent) << 23);
  }
};

// Q of a work tile in shared memory.
template <typename Tile>
__device__ __forceinline__ SwizzledRows<typename Tile::QueryLayout> query_rows(uint32_t queries) {
  using Layout = typename Tile::QueryLayout;
  return {queries, Layout::kAtomBytes, Tile::kBlockM * Layout::kPanelBytes};
}

// Converts a row of kChunks chunks of type T to f16, after change(chunk, x). Four lanes share a
// row. Returns by what its scores are then too small.
template <typename T, int kChunks, typename Layout, typename Change>
__device__ __forceinline__ float convert_query(const SwizzledRows<Layout>& rows, int row,
                                               const Change& change) {
  const auto for_each_chunk = [&](const auto& visit) {
#pragma unroll 4
    for (int chunk = threadIdx.x % 4; chunk < kChunks; chunk += 4) {
      float x[8];
      unpack(rows.template chunk<T>(row, chunk), x);
      change(chunk, x);
      visit(chunk, x);
    }
  };
  float largest = 0.0f;
  for_each_chunk([&](int, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
  });
  const PowerOfTwo<8> power(quad_max(largest));
  for_each_chunk([&](int chunk, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= power.factor;
    rows.template chunk<f16>(row, chunk) = pack<f16>(x);
  });
  return power.inverse;
}

// Converts this warp's rows to f16. Returns by what this lane's scores are then too small.
// fence_shared_for_async() and a barrier of the consumer must follow.
template <typename Tile>
__device__ __forceinline__ void convert_queries(uint32_t queries, float (&scale)[2]) {
  const auto rows = query_rows<Tile>(queries);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale[half] = convert_query<typename Tile::Query, Tile::kDimK / 8>(rows, sm90_row<Tile>(half),
                                                                       [](int, float (&)[8]) {});
  }
}

// Splits this lane's rows from `first` on, of two, into two e4m3 numbers each. It holds all of them
// in registers, because consumers wait for it at the begin of each work tile.
template <typename Tile, int kRows>
__device__ __forceinline__ void split_rows_of_queries(uint32_t queries, int first,
                                                      float (&scale)[2]) {
  constexpr int kChunks = 4, kGroups = Tile::kDimK / (8 * kChunks);  // of a row
  constexpr int kGroupsOfLane = (kGroups + 3) / 4;
  using Chunk = Vec<typename Tile::Query>;
  const auto rows = query_rows<Tile>(queries);
  const auto for_each_group = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < kRows * kGroupsOfLane; ++i) {
      const int row = i % kRows, group = i / kRows * 4 + threadIdx.x % 4;
      if (kGroups % 4 == 0 || group < kGroups) {
        visit(row, i / kRows, [&](int chunk) -> Chunk& {
          return rows.template chunk<typename Tile::Query>(sm90_row<Tile>(first + row),
                                                           group * kChunks + chunk);
        });
      }
    }
  };
  Chunk x[kRows][kGroupsOfLane][kChunks];
  float largest[kRows] = {};
  for_each_group([&](int row, int i, const auto& chunk) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) x[row][i][j] = chunk(j);
  });
  for_each_group([&](int row, int i, const auto&) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      float eight[8];
      unpack(x[row][i][j], eight);
#pragma unroll
      for (int k = 0; k < 8; ++k) largest[row] = fmaxf(largest[row], fabsf(eight[k]));
    }
  });
  float factor[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const PowerOfTwo<7> power(quad_max(largest[row]));
    factor[row] = power.factor;
    scale[first + row] = power.inverse;
  }
  for_each_group([&](int row, int i, const auto& chunk) {
#pragma unroll
    for (int pair = 0; pair < kChunks / 2; ++pair) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float eight[8], rounded[4];
        unpack(x[row][i][2 * pair + j / 2], eight);
        float* const four = eight + j % 2 * 4;
#pragma unroll
        for (int k = 0; k < 4; ++k) four[k] *= factor[row];
        high[j] = pack_fp8<e4m3>(four[0], four[1], four[2], four[3]);
        unpack_fp8<e4m3>(high[j], rounded);
        low[j] = pack_fp8<e4m3>(four[0] - rounded[0], four[1] - rounded[1], four[2] - rounded[2],
                                four[3] - rounded[3]);
      }
      chunk(pair).bits = make_uint4(high[0], high[1], high[2], high[3]);
      chunk(kChunks / 2 + pair).bits = make_uint4(low[0], low[1], low[2], low[3]);
    }
  });
}

// Splits this warp's rows, in the way of convert_queries(): both rows of a lane at once where there
// are registers.
template <typename Tile>
__device__ __forceinline__ void split_queries(uint32_t queries, float (&scale)[2]) {
  if constexpr (Tile::kDimK <= 128) {
    split_rows_of_queries<Tile, 2>(queries, 0, scale);
  } else {
    split_rows_of_queries<Tile, 1>(queries, 0, scale);
    split_rows_of_queries<Tile, 1>(queries, 1, scale);
  }
}

#endif  // __CUDACC__

}  // namespace precast
