// SPDX-License-Identifier: Apache-2.0
// The two matrix products of attention on a KV block in shared memory:
//
//   gemm_qk  acc_s += Q K^T
//   gemm_pv  acc_o += P V
//
// by m16n8k16 MMAs (core/mma.cuh). FP8 keys and values are converted to f16 in registers.
#pragma once

#include "precast/attention/kv_format.cuh"
#include "precast/attention/tile.cuh"
#include "precast/core/fp8_to_f16.cuh"
#include "precast/core/mma.cuh"
#include "precast/core/vec.cuh"

namespace precast {

#if defined(__CUDACC__)

// The operand type of the MMAs.
template <typename Q, typename KV>
struct MmaType {
  using type = Q;
};
template <typename Q>
struct MmaType<Q, e4m3> {
  using type = f16;
};
template <typename Q>
struct MmaType<Q, e5m2> {
  using type = f16;
};
template <typename Q>
struct MmaType<Q, Nvfp4> {
  using type = f16;
};

// The offsets of this lane's first ldmatrix row in K and in V, from the start of a stage.
template <typename Tile>
struct KvLaneOffsets {
  uint32_t k, v;

  __device__ __forceinline__ KvLaneOffsets()
      : k(Tile::kFp8 ? rows_first<typename Tile::KeyRows>()
                     : chunks_first<typename Tile::KeyRows>()),
        v(rows_first<typename Tile::ValueRows>()) {
    keep_in_register(k);
    keep_in_register(v);
  }
};

// acc_s [16 kRowTiles, 8 kMmaN] += Q [16 kRowTiles, kDimK] K^T, with K [8 kMmaN, kDimK] at the
// shared address `smem_k`. `q_frag.load(a, step)` gives the A operands of 16 columns of Q. With
// FP8, one register of K holds four neighbouring columns of a token, and becomes both registers of
// a B operand; permute_q_columns() puts the columns of Q into that order.
template <typename Tile, typename Q, typename KV, typename QFrag, int kMmaN>
__device__ __forceinline__ void gemm_qk(float (&acc_s)[Tile::kRowTiles][kMmaN][4], uint32_t smem_k,
                                        int lane_offset, const QFrag& q_frag) {
  using T = typename MmaType<Q, KV>::type;
  using Rows = typename Tile::KeyRows;
  constexpr int kSteps = Tile::kDimK / 16;
  if constexpr (!Tile::kFp8) {
    uint32_t q_stages[2][Tile::kRowTiles][4];  // this k step and the next
    q_frag.load(q_stages[0], 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto& a = q_stages[step % 2];
#pragma unroll
      for (int pair = 0; pair < kMmaN / 2; ++pair) {
        uint32_t b[4];  // 16 tokens
        ldmatrix_x4(b, smem_k + Rows::later(lane_offset, 2 * step) + pair * 16 * Rows::kStride);
        if (pair == 0 && step + 1 < kSteps) q_frag.load(q_stages[(step + 1) % 2], step + 1);
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m) {
          mma_m16n8k16<T>(acc_s[m][2 * pair], a[m], b[0], b[1]);
          mma_m16n8k16<T>(acc_s[m][2 * pair + 1], a[m], b[2], b[3]);
        }
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      const bool is_pair = step + 1 < kSteps;
      uint32_t a[2][Tile::kRowTiles][4];
      q_frag.load(a[0], step);
      if (is_pair) q_frag.load(a[1], step + 1);
      // If the number of k steps is odd, the last chunk is loaded twice.
      const int offset =
          is_pair ? Rows::later(lane_offset, step) : Rows::offset(threadIdx.x % 16, 0) + step * 16;
#pragma unroll
      for (int pair = 0; pair < kMmaN / 2; ++pair) {
        uint32_t b[4];  // 16 tokens
        ldmatrix_x4(b, smem_k + offset + pair * 16 * Rows::kStride);
#pragma unroll
        for (int i = 0; i < (is_pair ? 4 : 2); ++i) {
          uint32_t b0, b1;
          fp8x4_to_f16x2<KV>(b[i], b0, b1);
#pragma unroll
          for (int m = 0; m < Tile::kRowTiles; ++m) {
            mma_m16n8k16<T>(acc_s[m][2 * pair + i % 2], a[i / 2][m], b0, b1);
          }
        }
      }
    }
  }
}

// acc_o [16 kRowTiles, kWarpDimV] += P [16 kRowTiles, 16 kSteps] V, with V [16 kSteps, kWarpDimV]
// at the shared address `smem_v`. With FP8, accumulators 2 i and 2 i + 1 hold the even and the odd
// columns of 16, as for_each_column_pair() in attention/epilogue.cuh expects.
template <typename Tile, typename Q, typename KV, int kSteps>
__device__ __forceinline__ void gemm_pv(float (&acc_o)[Tile::kRowTiles][Tile::kWarpDimV / 8][4],
                                        const uint32_t (&p_frag)[Tile::kRowTiles][kSteps][4],
                                        uint32_t smem_v, int lane_offset) {
  using T = typename MmaType<Q, KV>::type;
  using Rows = typename Tile::ValueRows;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if constexpr (!Tile::kFp8) {
#pragma unroll
      for (int column = 0; column < Tile::kWarpDimV / 16; ++column) {
        uint32_t b[4];  // 16 tokens, 16 columns
        ldmatrix_x4_trans(
            b, smem_v + Rows::later(lane_offset, 2 * column) + step * 16 * Rows::kStride);
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m) {
          mma_m16n8k16<T>(acc_o[m][2 * column], p_frag[m][step], b[0], b[1]);
          mma_m16n8k16<T>(acc_o[m][2 * column + 1], p_frag[m][step], b[2], b[3]);
        }
      }
    } else {
      constexpr int kColumns = Tile::kWarpDimV / 16;
#pragma unroll
      for (int column = 0; column < kColumns; column += 2) {
        const bool is_pair = column + 1 < kColumns;
        const int offset = is_pair ? Rows::later(lane_offset, column)
                                   : Rows::offset(threadIdx.x % 16, 0) + column * 16;
        uint32_t b[4];  // 16 tokens, 32 columns
        ldmatrix_x4_trans(b, smem_v + offset + step * 16 * Rows::kStride);
#pragma unroll
        for (int i = 0; i < (is_pair ? 2 : 1); ++i) {
          // Bytes: token, column; token, column + 1; token + 1, column; token + 1, column + 1.
          uint32_t even[2], odd[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            fp8x4_to_f16x2<KV>(__byte_perm(b[2 * i + j], 0u, 0x3120), even[j], odd[j]);
          }
#pragma unroll
          for (int m = 0; m < Tile::kRowTiles; ++m) {
            mma_m16n8k16<T>(acc_o[m][2 * (column + i)], p_frag[m][step], even[0], even[1]);
            mma_m16n8k16<T>(acc_o[m][2 * (column + i) + 1], p_frag[m][step], odd[0], odd[1]);
          }
        }
      }
    }
  }
}

// exp_scores() and gemm_pv() in one, for 16-bit values: P of a k step is computed while the MMAs of
// the step before run. Why: P of the whole KV block needs more registers than there are. row_sum is
// the product of P with ones. `overlap` is called while the first exponentials are in flight.
template <typename Tile, typename T, typename Softmax, int kMmaN, typename Overlap>
__device__ __forceinline__ void exp_scores_and_gemm_pv(
    Softmax& softmax, const float (&acc_s)[Tile::kRowTiles][kMmaN][4], float scale, uint32_t smem_v,
    int lane_offset, const Overlap& overlap) {
  using Rows = typename Tile::ValueRows;
  constexpr int kSteps = kMmaN / 2;
  const uint32_t ones = pack_pair(T(), 1.0f, 1.0f);
  uint32_t p_stages[2][Tile::kRowTiles][4];  // P of this k step and of the next
  softmax.template exp_scores_of_step<T>(acc_s, scale, 0, p_stages[0]);
  overlap();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const auto& a = p_stages[step % 2];
    if (step + 1 < kSteps) {
      softmax.template exp_scores_of_step<T>(acc_s, scale, step + 1, p_stages[(step + 1) % 2]);
    }
#pragma unroll
    for (int column = 0; column < Tile::kWarpDimV / 16; ++column) {
      uint32_t b[4];  // 16 tokens, 16 columns
      ldmatrix_x4_trans(b,
                        smem_v + Rows::later(lane_offset, 2 * column) + step * 16 * Rows::kStride);
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) {
        mma_m16n8k16<T>(softmax.acc_o[m][2 * column], a[m], b[0], b[1]);
        mma_m16n8k16<T>(softmax.acc_o[m][2 * column + 1], a[m], b[2], b[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
      mma_m16n8k16<T>(softmax.acc_row_sum[m], a[m], ones, ones);
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
