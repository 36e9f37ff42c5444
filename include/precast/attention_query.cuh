// SPDX-License-Identifier: Apache-2.0
// The packed query rows of a tile: where they are, which tokens they may see, and their way into
// shared memory.
#pragma once

#include "precast/attention_params.cuh"
#include "precast/attention_tile.cuh"
#include "precast/core/mma.cuh"
#include "precast/core/vec.cuh"

namespace precast {

#if defined(__CUDACC__)

// A piece, with the head and the part of the values' columns that its kv_head stands for.
struct AttentionWork {
  Piece piece;
  int32_t head;          // of keys and values
  int32_t value_column;  // the first one
  int32_t first_row;     // packed
  int32_t rows;          // that exist, of the tile

  template <typename Tile>
  __device__ __forceinline__ void complete(const AttentionParams& p) {
    head = piece.kv_head / Tile::kParts;
    value_column = piece.kv_head % Tile::kParts * Tile::kDimV;
    first_row = piece.tile * Tile::kRows;
    // A plan that is made on the device may have more queries than there are.
    const int32_t queries = min(piece.q_len, p.q_rows - piece.q_begin);
    rows = max(0, min(queries * static_cast<int32_t>(p.group.value) - first_row, Tile::kRows));
  }
};

// A packed row of a tile.
struct AttentionRow {
  int32_t query;  // of the request
  int32_t head;   // of the queries

  __device__ __forceinline__ AttentionRow(const AttentionParams& p, const AttentionWork& work,
                                          int row) {
    const int32_t packed = work.first_row + row;
    query = static_cast<int32_t>(p.group.divide(packed));
    head = (work.head - query) * static_cast<int32_t>(p.group.value) + packed;
  }
};

// The tokens that a row sees by the causal mask and the window: [begin, end).
struct TokenLimits {
  int32_t begin, end;

  __device__ __forceinline__ TokenLimits(const AttentionParams& p, const Piece& piece,
                                         int32_t query) {
    const int32_t position = piece.kv_len - piece.q_len + query;
    begin = p.window_left >= 0 ? position - p.window_left : 0;
    end = piece.kv_end;
    if (p.mask == AttentionMask::causal && position < end) end = position + 1;
  }
};

// Sixteen numbers as the product with keys takes them. Keys of 8 bits are bytes whose fragments
// hold four neighbouring columns, so pairs 0, 2, 4, 6 come before pairs 1, 3, 5, 7; and the numbers
// become f16, which has more digits than bf16.
template <typename Tile, typename Q>
__device__ __forceinline__ void order_queries(uint4& low, uint4& high) {
  if constexpr (Tile::kFp8) {
    uint32_t pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if constexpr (TypeName<Q>::value == DType::bf16) {
#pragma unroll
      for (uint32_t& pair : pairs) {
        const float2 x = unpack_pair(bf16(), pair);
        pair = pack_pair(f16(), fminf(fmaxf(x.x, -65504.0f), 65504.0f),
                         fminf(fmaxf(x.y, -65504.0f), 65504.0f));
      }
    }
    low = make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
    high = make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
  }
}

// All threads of the CTA call; a barrier must follow. `load(row, column, query)` gives eight columns
// of a row in global memory; rows that do not exist are zeros.
template <typename Tile, typename Q, typename Load>
__device__ __forceinline__ void load_queries(const AttentionParams& p, const AttentionWork& work,
                                             unsigned char* target, const Load& load) {
  constexpr int kGroups = Tile::kDimK / 16;
  for (int i = threadIdx.x; i < Tile::kRows * kGroups; i += Tile::kThreads) {
    const int row = i / kGroups, group = i % kGroups;
    uint4 low = make_uint4(0u, 0u, 0u, 0u), high = low;
    if (row < work.rows) {
      const AttentionRow at(p, work, row);
      const Q* source = static_cast<const Q*>(p.q) +
                        int64_t(work.piece.q_begin + at.query) * p.q_stride +
                        at.head * p.q_head_stride;
      low = load(source, group * 16, at.query);
      high = load(source, group * 16 + 8, at.query);
      order_queries<Tile, Q>(low, high);
    }
    *reinterpret_cast<uint4*>(target + Tile::QueryRows::offset(row, 2 * group)) = low;
    *reinterpret_cast<uint4*>(target + Tile::QueryRows::offset(row, 2 * group + 1)) = high;
  }
}

#endif  // __CUDACC__

}  // namespace precast
