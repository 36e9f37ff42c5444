// SPDX-License-Identifier: Apache-2.0
// From the rows of a piece to results: teams of a CTA are merged in shared memory; a whole tile is
// written; parts of a tile go to slots of the workspace (attention/combine.cuh).
#pragma once

#include "precast/attention/softmax.cuh"

namespace precast {

#if defined(__CUDACC__)

// What a row's sums are to be multiplied by, and its log2 of the sum of exponentials.
struct RowEnd {
  float factor, lse;

  // A sink adds to the denominator alone.
  __device__ __forceinline__ RowEnd(const AttentionParams& p, int32_t head, float top,
                                    float total) {
    float scale = 1.0f;
    if (p.sinks != nullptr) {
      const float sink = load_scalar(p.sinks + head) * kLog2E;
      const float most = fmaxf(top, sink);
      scale = weight_of(top, most);
      total = total * scale + weight_of(sink, most);
      top = most;
    }
    // Why not total > 0: NaN is to remain.
    const bool is_empty = total == 0.0f;
    factor = is_empty ? 0.0f : scale * p.out_scale * fast_reciprocal(total);
    if (p.v_scale != nullptr) factor *= load_scalar(p.v_scale);
    lse = is_empty ? negative_infinity() : top + __log2f(total);
  }
};

template <typename Q>
__device__ __forceinline__ Q* output_of(const AttentionParams& p, const AttentionWork& work,
                                        const AttentionRow& row) {
  return static_cast<Q*>(p.out) + int64_t(work.piece.q_begin + row.query) * p.out_stride +
         row.head * p.out_head_stride + work.value_column;
}

__device__ __forceinline__ void write_lse(const AttentionParams& p, const AttentionWork& work,
                                          const AttentionRow& row, float lse) {
  if (p.lse == nullptr || work.value_column != 0) return;
  const int64_t heads = int64_t(p.kv_heads) * p.group.value;
  p.lse[int64_t(work.piece.q_begin + row.query) * heads + row.head] = lse;
}

// Calls put(column, x, y) for each pair of neighbouring columns that this lane holds of a row.
template <typename Tile, typename Put>
__device__ __forceinline__ void for_columns(const float (&sums)[Tile::kWarpDimV / 8][4], int half,
                                            const Put& put) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < Tile::kWarpDimV / 16; ++c) {
    const float* even = sums[2 * c] + 2 * half;
    const float* odd = sums[2 * c + 1] + 2 * half;
    if constexpr (Tile::kFp8) {
      put(16 * c + 4 * q, even[0], odd[0]);
      put(16 * c + 4 * q + 2, even[1], odd[1]);
    } else {
      put(16 * c + 2 * q, even[0], even[1]);
      put(16 * c + 8 + 2 * q, odd[0], odd[1]);
    }
  }
}

// A tile's rows as fp32: sums [kRows, kDimV], and of each row maximum and denominator.
struct PartialRows {
  float* sums;
  float2* ends;

  // A slot of the workspace, or a place like it.
  template <typename Tile>
  static __device__ __forceinline__ PartialRows at(float* slot) {
    return {slot, reinterpret_cast<float2*>(slot + Tile::kRows * Tile::kDimV)};
  }

  // Eight columns move by the row, so that lanes of four rows meet in no bank of shared memory.
  template <typename Tile>
  static __device__ __forceinline__ int place(int row, int column) {
    return row * Tile::kDimV + (Tile::kDimV % 32 == 0 ? column ^ (row & 3) * 8 : column);
  }
};

template <typename Tile>
constexpr int64_t kSlotFloats = attention_slot_floats(Tile::kRows, Tile::kDimV);

template <typename Tile>
__device__ __forceinline__ PartialRows slot_of(const AttentionParams& p, const Piece& piece) {
  return PartialRows::at<Tile>(p.partials + piece.slot(piece.part) * kSlotFloats<Tile>);
}

// What the teams of a CTA leave: sums in a free stage of each ring, the rest here.
template <typename Tile>
struct TeamResults {
  float2 ends[Tile::kTeams][Tile::kNarrow ? Tile::kRows : 1];
  int stages[Tile::kTeams];  // bytes from the ring's start

  __device__ __forceinline__ PartialRows of(unsigned char* rings, int team) {
    float* sums = reinterpret_cast<float*>(rings + team * Tile::kRingBytes + stages[team]);
    return {sums, ends[team]};
  }
};

// The rows of this warp, finished, that exist.
template <typename Tile>
__device__ __forceinline__ void write_partial(const RowStates<Tile>& states, int32_t rows,
                                              const PartialRows& target) {
  const int first_column = WarpShare<Tile>::first_column();
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_lane<Tile>(m, half);
      if (row >= rows) continue;
      for_columns<Tile>(states.sums[m], half, [&](int column, float x, float y) {
        const int place = PartialRows::place<Tile>(row, first_column + column);
        *reinterpret_cast<float2*>(target.sums + place) = make_float2(x, y);
      });
      if (threadIdx.x % 4 == 0 && first_column == 0) {
        target.ends[row] = make_float2(states.top[m][half], states.total[m][half]);
      }
    }
  }
}

// Without a branch, so that stores stand side by side.
__device__ __forceinline__ void store_if(bool exists, uint4* to, const uint4& x) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(exists ? 1u : 0u)
      : "memory");
}

// The rows of this warp, of a whole tile, by way of shared memory, whose stage all warps have left.
// Why: lanes then write 16 bytes of a row side by side, and not four bytes of eight rows.
template <typename Tile, typename Q>
__device__ __forceinline__ void write_rows(const AttentionParams& p, const AttentionWork& work,
                                           const RowStates<Tile>& states, unsigned char* stage) {
  using Share = WarpShare<Tile>;
  using Staged = SharedRows<Tile::kWarpDimV * 2, false>;
  constexpr int kChunks = Staged::kChunks;
  constexpr int kStride = Staged::kStride;
  // Rows of a warp that the stage takes at a time; less than 8 with keys of 8 bits and head_dim
  // 512, which goes without.
  constexpr int kFit = Tile::kStageBytes / (Tile::kWarps * kStride);
  constexpr int kAtOnce = kFit >= Share::kRows ? Share::kRows : kFit >= 16 ? 16 : 8;
  const int lane = threadIdx.x % 32;
  float factors[Share::kRows / 8];
  if (p.lse == nullptr && p.sinks == nullptr) {  // which head a row is of does not matter
#pragma unroll
    for (int i = 0; i < Share::kRows / 8; ++i) {
      factors[i] = RowEnd(p, 0, states.top[i / 2][i % 2], states.total[i / 2][i % 2]).factor;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Share::kRows / 8; ++i) {
      const int m = i / 2, half = i % 2, row = row_of_lane<Tile>(m, half);
      const AttentionRow at(p, work, row);
      const RowEnd end(p, at.head, states.top[m][half], states.total[m][half]);
      factors[i] = end.factor;
      if (lane % 4 == 0 && Share::half() == 0 && row < work.rows) write_lse(p, work, at, end.lse);
    }
  }
  if constexpr (kFit < 8) {
#pragma unroll
    for (int i = 0; i < Share::kRows / 8; ++i) {
      const int row = row_of_lane<Tile>(i / 2, i % 2);
      if (row >= work.rows) continue;
      Q* const out = output_of<Q>(p, work, AttentionRow(p, work, row)) + Share::first_column();
      for_columns<Tile>(states.sums[i / 2], i % 2, [&](int column, float x, float y) {
        *reinterpret_cast<uint32_t*>(out + column) = pack_pair(Q(), x * factors[i], y * factors[i]);
      });
    }
    return;
  }
  unsigned char* const rows = stage + threadIdx.x / 32 * kAtOnce * kStride;
  const WarpRows places(p, work, Share::first_row(), Share::kRows, p.out_stride, p.out_head_stride);
  uint4* const out = static_cast<uint4*>(p.out) + (work.value_column + Share::first_column()) / 8;
#pragma unroll
  for (int i = 0; i < Share::kRows / 8; ++i) {
    const int row = i * 8 % kAtOnce + lane / 4;
    for_columns<Tile>(states.sums[i / 2], i % 2, [&](int column, float x, float y) {
      unsigned char* const target = rows + Staged::offset(row, column / 8) + column % 8 * 2;
      *reinterpret_cast<uint32_t*>(target) = pack_pair(Q(), x * factors[i], y * factors[i]);
    });
    if ((i + 1) * 8 % kAtOnce != 0) continue;
    __syncwarp();
    constexpr int kRounds = (kAtOnce * kChunks + 31) / 32;
    constexpr int kMany = kRounds < 8 ? kRounds : 8;  // loads before the first store
#pragma unroll
    for (int begin = 0; begin < kRounds; begin += kMany) {
      uint4 bits[kMany];
      uint32_t to[kMany];
#pragma unroll
      for (int j = 0; j < kMany; ++j) {
        const int place = (begin + j) * 32 + lane, row = place / kChunks;
        to[j] = places.of((i + 1) * 8 - kAtOnce + row % kAtOnce);
        if (row >= kAtOnce) to[j] = WarpRows::kAbsent;
        bits[j] =
            *reinterpret_cast<const uint4*>(rows + Staged::offset(row % kAtOnce, place % kChunks));
      }
#pragma unroll
      for (int j = 0; j < kMany; ++j) {
        const int place = (begin + j) * 32 + lane;
        store_if(to[j] != WarpRows::kAbsent, out + to[j] + place % kChunks, bits[j]);
      }
    }
    __syncwarp();
  }
}

// Four columns of a row, out of parts that come one after another, kMany at once.
struct MergedColumns {
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float2 end = make_float2(negative_infinity(), 0.0f);

  template <int kMany>
  __device__ __forceinline__ void add(const float4 (&x)[kMany], const float2 (&ends)[kMany]) {
    float most = end.x;
#pragma unroll
    for (int i = 0; i < kMany; ++i) most = fmaxf(most, ends[i].x);
    const float old = weight_of(end.x, most);
    end = make_float2(most, end.y * old);
    sums = make_float4(sums.x * old, sums.y * old, sums.z * old, sums.w * old);
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      const float weight = weight_of(ends[i].x, most);
      end.y = fmaf(ends[i].y, weight, end.y);
      sums.x = fmaf(x[i].x, weight, sums.x);
      sums.y = fmaf(x[i].y, weight, sums.y);
      sums.z = fmaf(x[i].z, weight, sums.z);
      sums.w = fmaf(x[i].w, weight, sums.w);
    }
  }
};

// Writes four columns of a row, and with the first of them its lse.
template <typename Q>
__device__ __forceinline__ void write_merged(const AttentionParams& p, const AttentionWork& work,
                                             int row, int column, const MergedColumns& merged) {
  const AttentionRow at(p, work, row);
  const RowEnd end(p, at.head, merged.end.x, merged.end.y);
  uint2 bits;
  bits.x = pack_pair(Q(), merged.sums.x * end.factor, merged.sums.y * end.factor);
  bits.y = pack_pair(Q(), merged.sums.z * end.factor, merged.sums.w * end.factor);
  *reinterpret_cast<uint2*>(output_of<Q>(p, work, at) + column) = bits;
  if (column == 0) write_lse(p, work, at, end.lse);
}

// All threads of the CTA call, after a barrier.
template <typename Tile, typename Q>
__device__ __forceinline__ void merge_teams(const AttentionParams& p, const AttentionWork& work,
                                            unsigned char* rings, TeamResults<Tile>& results) {
  constexpr int kColumns = Tile::kDimV / 4;
  const bool is_whole = work.piece.parts == 1;
  for (int i = threadIdx.x; i < work.rows * kColumns; i += Tile::kThreads) {
    const int row = i / kColumns, column = i % kColumns * 4;
    const int place = PartialRows::place<Tile>(row, column);
    float4 x[Tile::kTeams];
    float2 ends[Tile::kTeams];
#pragma unroll
    for (int team = 0; team < Tile::kTeams; ++team) {
      const PartialRows part = results.of(rings, team);
      x[team] = *reinterpret_cast<const float4*>(part.sums + place);
      ends[team] = part.ends[row];
    }
    MergedColumns merged;
    merged.add(x, ends);
    if (is_whole) {
      write_merged<Q>(p, work, row, column, merged);
    } else {
      const PartialRows slot = slot_of<Tile>(p, work.piece);
      *reinterpret_cast<float4*>(slot.sums + place) = merged.sums;
      if (column == 0) slot.ends[row] = merged.end;
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
