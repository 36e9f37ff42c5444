// SPDX-License-Identifier: Apache-2.0
// The packed query rows of a tile: where they are, which tokens they may see, and their way into
// shared memory.
#pragma once

#include "precast/attention/warp_pair.cuh"
#include "precast/attention/params.cuh"
#include "precast/attention/tile.cuh"
#include "precast/core/cp_async.cuh"
#include "precast/core/mma.cuh"
#include "precast/core/vec.cuh"

namespace precast {

#if defined(__CUDACC__)

// A piece, with the head and the part of the values' columns that its kv_head stands for.
struct AttentionWork {
  Piece piece;
  int32_t head;                  // of keys and values
  int32_t value_column;          // the first one
  int32_t first_row;             // packed
  int32_t rows;                  // that exist, of the tile
  int32_t seen_begin, seen_end;  // tokens that all rows see by causal mask and window
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
    // Never negative: a difference of it and a token must not overflow.
    begin = p.window_left >= 0 && position > p.window_left ? position - p.window_left : 0;
    end = piece.kv_end;
    if (p.mask == AttentionMask::causal && position < end) end = position + 1;
  }
};

// A piece in the queue, with the first row of its head's keys and values: page or token 0. The
// narrow tile has registers for those.
template <bool kIsNarrow>
struct QueuedWork : AttentionWork {
  const uint4 *keys, *values;
};
template <>
struct QueuedWork<true> : AttentionWork {};

// The pieces of a CTA, in shared memory: the one in use, the two behind it, and, but for the narrow
// tile, the one before, whose results some warps may still be writing. Why not in registers: the
// wide tile has none left. Of a list, kAtOnce pieces are found at once, by as many threads: to find
// one takes as long as half a group of tokens, and all warps wait for it.
template <typename Tile>
struct AttentionQueue {
  static constexpr int kAtOnce = Tile::kNarrow ? 1 : 4;
  static constexpr int kSlots = Tile::kNarrow ? 3 : 8;

  QueuedWork<Tile::kNarrow> works[kSlots];
  bool exists[kSlots];
  int32_t* counters;
  alignas(16) unsigned char iterator[sizeof(PieceIterator)];  // shared memory has no constructors

  __device__ PieceIterator& pieces() { return *reinterpret_cast<PieceIterator*>(iterator); }

  // The first kAtOnce threads call, for the pieces 1, 2 and so on; their CTA sees them after a
  // barrier.
  __device__ void take(const AttentionParams& p, int number) {
    if constexpr (kAtOnce > 1) {
      if (pieces().is_list()) {
        if (number % kAtOnce != 1) return;
        number += threadIdx.x;
        exists[number % kSlots] = pieces().item_of_round(number, works[number % kSlots].piece);
        if (exists[number % kSlots]) complete(p, number % kSlots);
        return;
      }
    }
    if (threadIdx.x == 0) take_next(p, number % kSlots);
  }

  __device__ void take_next(const AttentionParams& p, int slot) {
    exists[slot] = pieces().next(works[slot].piece);
    if (exists[slot]) complete(p, slot);
  }

  __device__ void complete(const AttentionParams& p, int slot) {
    QueuedWork<Tile::kNarrow>& work = works[slot];
    work.head = work.piece.kv_head / Tile::kParts;
    work.value_column = work.piece.kv_head % Tile::kParts * Tile::kDimV;
    work.first_row = work.piece.tile * Tile::kRows;
    if constexpr (!Tile::kNarrow) {
      work.keys = static_cast<const uint4*>(p.k.data) + work.head * p.k.head_stride;
      work.values = static_cast<const uint4*>(p.v.data) + work.head * p.v.head_stride +
                    work.value_column * Tile::kKvBytes / 16;
    }
    // A plan that is made on the device may have more queries than there are.
    const int32_t queries = max(0, min(work.piece.q_len, p.q_rows - work.piece.q_begin));
    const int32_t rows = queries * static_cast<int32_t>(p.group.value) - work.first_row;
    work.rows = max(0, min(rows, Tile::kRows));
    const AttentionRow first(p, work, 0), last(p, work, work.rows - 1);
    work.seen_begin = TokenLimits(p, work.piece, last.query).begin;
    work.seen_end = TokenLimits(p, work.piece, first.query).end;
  }

  __device__ void start(const AttentionParams& p) {
    // Loads of both are under way at once: what another call's plan says is read, but not followed.
    const bool planned = is_planned(p.schedule, p.slots);
    pieces() = PieceIterator(p.schedule, blockIdx.x);
    counters = pieces().counters();
    exists[0] = false;
    if (planned) take_next(p, 0);
  }
};

// Queries in shared memory. The rows of the narrow tile are all warps', and the next piece's are
// copied while this one's are in use; else a warp has rows of its own, and may overwrite them as
// soon as it has used them. Of a pair each warp brings half of the rows.
template <typename Tile>
struct QueryRowsOfWarp {
  static constexpr int kLoaders = Tile::kNarrow ? Tile::kThreads : 32;
  static constexpr int kRows = Tile::kPaired ? 16 : 16 * Tile::kRowTiles;

  static __device__ __forceinline__ int first() {
    return Tile::kNarrow ? 0 : threadIdx.x / 32 * kRows;
  }
  static __device__ __forceinline__ void barrier() {
    if constexpr (Tile::kNarrow) {
      __syncthreads();
    } else if constexpr (Tile::kPaired) {
      WarpPair<Tile>::barrier();
    } else {
      __syncwarp();
    }
  }
};

// Where the rows of a warp are in queries or results, in steps of 16 bytes from their start. Each
// lane finds one row for its warp.
class WarpRows {
 public:
  static constexpr uint32_t kAbsent = 0xffffffffu;

  // `count` rows from `first` on; strides in numbers of 2 bytes.
  __device__ __forceinline__ WarpRows(const AttentionParams& p, const AttentionWork& work,
                                      int first, int count, int64_t stride, int64_t head_stride) {
    const int row = first + threadIdx.x % 32 % count;
    const AttentionRow at(p, work, row);
    const int64_t place = int64_t(work.piece.q_begin + at.query) * stride + at.head * head_stride;
    own_ = row < work.rows ? static_cast<uint32_t>(place / 8) : kAbsent;
  }

  // All lanes call. `row` counts from the warp's first.
  __device__ __forceinline__ uint32_t of(int row) const {
    return __shfl_sync(0xffffffffu, own_, row);
  }

 private:
  uint32_t own_;
};

// Starts to copy the rows to shared memory, and closes the group. Rows that do not exist are zeros.
template <typename Tile>
__device__ __forceinline__ void copy_queries(const AttentionParams& p, const AttentionWork& work,
                                             uint32_t target) {
  using Rows = QueryRowsOfWarp<Tile>;
  constexpr int kChunks = Tile::kDimK / 8;
  constexpr int kAll = Rows::kRows * kChunks;
  const WarpRows rows(p, work, Rows::first(), Rows::kRows, p.q_stride, p.q_head_stride);
#pragma unroll 4
  for (int first = 0; first < kAll; first += Rows::kLoaders) {
    const int i = first + threadIdx.x % Rows::kLoaders;
    const int row = i / kChunks, chunk = i % kChunks;
    const uint32_t source = rows.of(row % 32);
    if (kAll % Rows::kLoaders != 0 && i >= kAll) continue;
    const bool exists = source != WarpRows::kAbsent;
    copy_async(target + Tile::QueryRows::offset(Rows::first() + row, chunk),
               static_cast<const uint4*>(p.q) + (exists ? source + chunk : 0u), exists);
  }
  close_copies();
}

// x between -most and most; NaN stays what it is.
__device__ __forceinline__ float within(float x, float most) {
  return fabsf(x) > most ? copysignf(most, x) : x;
}

// Sixteen numbers as the product with keys of 8 bits takes them: the fragments of those hold four
// neighbouring columns, so pairs 0, 2, 4, 6 come before pairs 1, 3, 5, 7. The numbers become f16,
// which has more digits than bf16.
template <typename Q>
__device__ __forceinline__ void order_queries(uint4& low, uint4& high) {
  uint32_t pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if constexpr (TypeName<Q>::value == DType::bf16) {
#pragma unroll
    for (uint32_t& pair : pairs) {
      const float2 x = unpack_pair(bf16(), pair);
      pair = pack_pair(f16(), within(x.x, 65504.0f), within(x.y, 65504.0f));
    }
  }
  low = make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
  high = make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
}

// Orders the rows in place, between barriers of those who share them.
template <typename Tile, typename Q>
__device__ __forceinline__ void order_queries(unsigned char* queries) {
  using Rows = QueryRowsOfWarp<Tile>;
  constexpr int kGroups = Tile::kDimK / 16;
  for (int i = threadIdx.x % Rows::kLoaders; i < Rows::kRows * kGroups; i += Rows::kLoaders) {
    const int row = Rows::first() + i / kGroups, chunk = i % kGroups * 2;
    uint4* low = reinterpret_cast<uint4*>(queries + Tile::QueryRows::offset(row, chunk));
    uint4* high = reinterpret_cast<uint4*>(queries + Tile::QueryRows::offset(row, chunk + 1));
    uint4 x = *low, y = *high;
    order_queries<Q>(x, y);
    *low = x;
    *high = y;
  }
}

// The operands of a warp's queries: from shared memory each time, or held in registers where they
// leave room, if only for some steps.
template <typename Tile>
struct QueryOperands {
  static constexpr int kSteps = Tile::kDimK / 16;
  static constexpr bool kHeld = !Tile::kGeneral && Tile::kRowTiles == 1 && Tile::kDimK <= 128;
  static constexpr bool kHeldInPart = !Tile::kGeneral && Tile::kPaired && !Tile::kFp8;
  static constexpr int kHeldSteps = kHeld ? kSteps : kHeldInPart ? 4 : 0;

  __device__ __forceinline__ explicit QueryOperands(uint32_t queries) {
    rows_ = queries + WarpShare<Tile>::first_row() * Tile::QueryRows::kStride;
    lane_ = rows_first<typename Tile::QueryRows>();
    keep(lane_);
#pragma unroll
    for (int step = 0; step < kHeldSteps; ++step) {
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) load_matrices(held_[step][m], address(m, step));
    }
  }

  __device__ __forceinline__ void load(uint32_t (&a)[Tile::kRowTiles][4], int step) const {
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      if (step < kHeldSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = held_[step][m][i];
      } else {
        load_matrices(a[m], address(m, step));
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t address(int m, int step) const {
    return rows_ + m * 16 * Tile::QueryRows::kStride + Tile::QueryRows::later(lane_, 2 * step);
  }

  uint32_t rows_;
  uint32_t lane_;
  uint32_t held_[kHeldSteps > 0 ? kHeldSteps : 1][Tile::kRowTiles][4];
};

#endif  // __CUDACC__

}  // namespace precast
