// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding inside of attention: Q and K are rotated by their positions. The KV
// cache holds keys that are not rotated. Columns i and i + head_dim / 2 are a pair, rotated by
//
//   position * theta^(-2 i / head_dim) / rope_scale   radians
//
// A rotated number is rounded once, to the operand type of the MMAs.
//
// Source   Su et al., RoFormer, arXiv:2104.09864.
#pragma once

#include "precast/attention/gemm.cuh"
#include "precast/attention/query.cuh"
#include "precast/core/math.cuh"

namespace precast {

#if defined(__CUDACC__)

// The rotation per position of a pair of columns, in full turns, as the sum of two fp32. Why two:
// the angles of long contexts need more bits than one fp32 has.
using RotaryFreq = float2;  // [kDimK / 2] in shared memory

template <typename Tile>
__device__ __forceinline__ void init_rotary_freqs(const AttentionParams& p, RotaryFreq* freqs) {
  for (int i = Tile::thread(); i < Tile::kDimK / 2; i += Tile::kThreads) {
    const double freq = exp2(-2.0 * i / Tile::kDimK * p.rope_log2_theta) * p.rope_inverse_scale *
                        0.15915494309189535;  // 1 / (2 pi)
    const float high = static_cast<float>(freq);
    freqs[i] = make_float2(high, static_cast<float>(freq - high));
  }
}

struct SineCosine {
  float sine, cosine;

  __device__ __forceinline__ SineCosine(RotaryFreq freq, int32_t position) {
    const float pos = static_cast<float>(position);
    const float turns = pos * freq.x;
    const float rest = fmaf(pos, freq.x, -turns) + pos * freq.y;
    const float angle = 6.283185307179586f * (turns - rintf(turns) + rest);
    sine = __sinf(angle);
    cosine = __cosf(angle);
  }
};

// Rotates x, which is in column `column`; y is in the other column of the pair. Returns the new x.
template <typename Tile>
__device__ __forceinline__ float rotate(const RotaryFreq* freqs, int32_t position, int column,
                                        float x, float y) {
  const bool is_low = column < Tile::kDimK / 2;
  const SineCosine by(freqs[is_low ? column : column - Tile::kDimK / 2], position);
  return is_low ? x * by.cosine - y * by.sine : x * by.cosine + y * by.sine;
}

template <typename Tile>
__device__ __forceinline__ int paired_column(int column) {
  constexpr int kHalf = Tile::kDimK / 2;
  return column < kHalf ? column + kHalf : column - kHalf;
}

// Rotates eight columns from 8 * chunk on, with the columns that they are pairs of.
template <typename T>
__device__ __forceinline__ void rotate_chunks(const RotaryFreq* freqs, int32_t position, int chunk,
                                              Vec<T>& low, Vec<T>& high) {
  float x[8], y[8];
  unpack(low, x);
  unpack(high, y);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const SineCosine by(freqs[chunk * 8 + j], position);
    const float old_x = x[j];
    x[j] = old_x * by.cosine - y[j] * by.sine;
    y[j] = y[j] * by.cosine + old_x * by.sine;
  }
  low = pack<T>(x);
  high = pack<T>(y);
}

// Rotates Q in shared memory. QLoadPartition::barrier() must come before and after.
template <typename Tile, typename Q>
__device__ __forceinline__ void rotate_q(const AttentionParams& p, const BlockInfo& block,
                                         const RotaryFreq* freqs, unsigned char* smem_q) {
  using Partition = QLoadPartition<Tile>;
  constexpr int kPairs = Tile::kDimK / 16;  // pairs of chunks of eight columns
  const int32_t shift = block.work.kv_len - block.work.q_len;
  for (int i = threadIdx.x % Partition::kThreads; i < Partition::kRows * kPairs;
       i += Partition::kThreads) {
    const int row = Partition::first_row() + i / kPairs, chunk = i % kPairs;
    const int32_t position = PackGqaRow(p, block, row).q_idx + shift;
    rotate_chunks<Q>(
        freqs, position, chunk,
        *reinterpret_cast<Vec<Q>*>(smem_q + Tile::QueryRows::offset(row, chunk)),
        *reinterpret_cast<Vec<Q>*>(smem_q + Tile::QueryRows::offset(row, chunk + kPairs)));
  }
}

// Loads two neighbouring columns of a key from shared memory, as fp32.
template <typename Rows, typename KV>
__device__ __forceinline__ float2 load_k_columns(uint32_t smem_k, int row, int column) {
  using Stage = typename KvFormat<KV>::Stage;
  const int byte = column * static_cast<int>(sizeof(Stage));
  const uint32_t address = smem_k + Rows::offset(row, byte / 16) + byte % 16;
  if constexpr (sizeof(Stage) == 2) {
    uint32_t bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
    return unpack_pair(Stage(), bits);
  } else {
    unsigned short bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
    uint32_t low, high;
    fp8x4_to_f16x2<KV>(bits, low, high);
    return unpack_pair(f16(), low);
  }
}

// gemm_qk() with keys that are rotated on the way to the MMA. `first_position`: that of the first
// key.
template <typename Tile, typename Q, typename KV, typename QFrag>
__device__ __forceinline__ void gemm_qk_rotary(float (&acc_s)[Tile::kRowTiles][Tile::kWarpN / 8][4],
                                               uint32_t smem_k, const QFrag& q_frag,
                                               const RotaryFreq* freqs, int32_t first_position) {
  using T = typename MmaType<Q, KV>::type;
  using Rows = typename Tile::KeyRows;
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const auto operand = [&](int token, int column) {
    const float2 x = load_k_columns<Rows, KV>(smem_k, token, column);
    const float2 y = load_k_columns<Rows, KV>(smem_k, token, paired_column<Tile>(column));
    return pack_pair(T(), rotate<Tile>(freqs, first_position + token, column, x.x, y.x),
                     rotate<Tile>(freqs, first_position + token, column + 1, x.y, y.y));
  };
#pragma unroll 1
  for (int step = 0; step < Tile::kDimK / 16; ++step) {
    uint32_t a[Tile::kRowTiles][4];
    q_frag.load(a, step);
#pragma unroll
    for (int n = 0; n < Tile::kWarpN / 8; ++n) {
      const int column = step * 16 + (Tile::kFp8 ? 4 * q : 2 * q);
      const uint32_t b0 = operand(n * 8 + g, column);
      const uint32_t b1 = operand(n * 8 + g, column + (Tile::kFp8 ? 2 : 8));
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) mma_m16n8k16<T>(acc_s[m][n], a[m], b0, b1);
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
