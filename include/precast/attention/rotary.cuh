// SPDX-License-Identifier: Apache-2.0
// Queries and keys turned by their positions inside of attention, halves of a head against each
// other: columns i and i + head_dim / 2 by position * theta^(-2 i / head_dim) / rope_scale radians.
//
// The cache holds keys as they are. What is turned is rounded once, to the type of the products.
//
// Source   Su et al., RoFormer, arXiv:2104.09864.
#pragma once

#include "precast/attention/gemm.cuh"
#include "precast/attention/query.cuh"
#include "precast/core/math.cuh"

namespace precast {

#if defined(__CUDACC__)

// Turns of a pair for each position, as the sum of two fp32: angles of long texts need more digits
// than one has.
using RopeTurns = float2;  // [kDimK / 2] in shared memory

template <typename Tile>
__device__ __forceinline__ void fill_turns(const AttentionParams& p, RopeTurns* turns) {
  for (int i = threadIdx.x; i < Tile::kDimK / 2; i += Tile::kThreads) {
    const double turn = exp2(-2.0 * i / Tile::kDimK * p.rope_log2_theta) * p.rope_inverse_scale *
                        0.15915494309189535;  // 1 / (2 pi)
    const float high = static_cast<float>(turn);
    turns[i] = make_float2(high, static_cast<float>(turn - high));
  }
}

// x of column `column` and y of the other column of its pair; gives the new x.
template <typename Tile>
__device__ __forceinline__ float turned(const RopeTurns* turns, int32_t position, int column,
                                        float x, float y) {
  const bool is_low = column < Tile::kDimK / 2;
  const RopeTurns turn = turns[is_low ? column : column - Tile::kDimK / 2];
  const float at = static_cast<float>(position);
  const float whole = at * turn.x;
  const float rest = fmaf(at, turn.x, -whole) + at * turn.y;
  const float angle = 6.283185307179586f * (whole - rintf(whole) + rest);
  const float sine = __sinf(angle), cosine = __cosf(angle);
  return is_low ? x * cosine - y * sine : x * cosine + y * sine;
}

template <typename Tile>
__device__ __forceinline__ int other_column(int column) {
  constexpr int kHalf = Tile::kDimK / 2;
  return column < kHalf ? column + kHalf : column - kHalf;
}

// Turns the query rows in shared memory, between barriers of those who share them.
template <typename Tile, typename Q>
__device__ __forceinline__ void turn_queries(const AttentionParams& p, const AttentionWork& work,
                                             const RopeTurns* turns, unsigned char* queries) {
  using Rows = QueryRowsOfWarp<Tile>;
  constexpr int kPairs = Tile::kDimK / 16;  // of eight columns
  const int32_t shift = work.piece.kv_len - work.piece.q_len;
  for (int i = threadIdx.x % Rows::kLoaders; i < Rows::kRows * kPairs; i += Rows::kLoaders) {
    const int row = Rows::first() + i / kPairs, chunk = i % kPairs;
    const int32_t position = AttentionRow(p, work, row).query + shift;
    Vec<Q>* low = reinterpret_cast<Vec<Q>*>(queries + Tile::QueryRows::offset(row, chunk));
    Vec<Q>* high =
        reinterpret_cast<Vec<Q>*>(queries + Tile::QueryRows::offset(row, chunk + kPairs));
    float x[8], y[8], new_x[8], new_y[8];
    unpack(*low, x);
    unpack(*high, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = chunk * 8 + j;
      new_x[j] = turned<Tile>(turns, position, column, x[j], y[j]);
      new_y[j] = turned<Tile>(turns, position, column + Tile::kDimK / 2, y[j], x[j]);
    }
    *low = pack<Q>(new_x);
    *high = pack<Q>(new_y);
  }
}

// Two columns of a key in shared memory, as fp32.
template <typename Rows, typename KV>
__device__ __forceinline__ float2 load_key_pair(uint32_t keys, int row, int column) {
  const int byte = column * static_cast<int>(sizeof(KV));
  const uint32_t at = keys + Rows::offset(row, byte / 16) + byte % 16;
  if constexpr (sizeof(KV) == 2) {
    uint32_t bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(at) : "memory");
    return unpack_pair(KV(), bits);
  } else {
    unsigned short bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(at) : "memory");
    uint32_t low, high;
    widen<KV>(bits, low, high);
    return unpack_pair(f16(), low);
  }
}

// multiply_keys() with keys that it turns on the way; `first` is the position of the first.
template <typename Tile, typename Q, typename KV, typename Queries>
__device__ __forceinline__ void multiply_turned_keys(
    float (&scores)[Tile::kRowTiles][Tile::kWarpTokens / 8][4], uint32_t keys,
    const Queries& queries, const RopeTurns* turns, int32_t first) {
  using T = typename ProductType<Q, KV>::type;
  using Rows = typename Tile::KeyRows;
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const auto operand = [&](int token, int column) {
    const float2 x = load_key_pair<Rows, KV>(keys, token, column);
    const float2 y = load_key_pair<Rows, KV>(keys, token, other_column<Tile>(column));
    return pack_pair(T(), turned<Tile>(turns, first + token, column, x.x, y.x),
                     turned<Tile>(turns, first + token, column + 1, x.y, y.y));
  };
#pragma unroll 1
  for (int step = 0; step < Tile::kDimK / 16; ++step) {
    uint32_t a[Tile::kRowTiles][4];
    queries.load(a, step);
#pragma unroll
    for (int n = 0; n < Tile::kWarpTokens / 8; ++n) {
      const int column = step * 16 + (Tile::kFp8 ? 4 * q : 2 * q);
      const uint32_t b0 = operand(n * 8 + g, column);
      const uint32_t b1 = operand(n * 8 + g, column + (Tile::kFp8 ? 2 : 8));
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) multiply_add<T>(scores[m][n], a[m], b0, b1);
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
