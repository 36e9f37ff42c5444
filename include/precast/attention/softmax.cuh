// SPDX-License-Identifier: Apache-2.0
// Online softmax over KV blocks. For each row it keeps
//
//   row_max  the maximum of the logits, in base 2
//   row_sum  sum_j 2^(logit_j - row_max)
//   acc_o    sum_j 2^(logit_j - row_max) v_j
//
// row_max may lag behind the true maximum by up to kRescaleThreshold. P then exceeds 1, up to
// 2^kRescaleThreshold, which loses no precision, and acc_o is rescaled much less often.
//
// Threads  Lane 4 g + q of a warp holds rows g and g + 8 of each m16 tile, and of these the columns
//          that core/mma.cuh gives an accumulator. In arrays of rows the index `half` is 0 for row
//          g and 1 for row g + 8.
// Source   Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867;
//          Dao et al., FlashAttention, arXiv:2205.14135.
#pragma once

#include "precast/attention/query.cuh"
#include "precast/core/math.cuh"

namespace precast {

#if defined(__CUDACC__)

// The maximum of the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The sum of the four lanes that share a row.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// 2^(x - row_max), or 0 for a row that has attended to no token yet.
__device__ __forceinline__ float exp2_relative(float x, float row_max) {
  return row_max == negative_infinity() ? 0.0f : fast_exp2(x - row_max);
}

// The row of the tile that a lane holds; m: m16 tile of the warp.
template <typename Tile>
__device__ __forceinline__ int row_of_lane(int m, int half) {
  const int warp = Tile::kWarpsSplitKv ? 0 : threadIdx.x / (Tile::kPaired ? 64 : 32);
  return (warp * Tile::kRowTiles + m) * 16 + half * 8 + threadIdx.x % 32 / 4;
}

// The softmax state of a warp's rows, with acc_o.
template <typename Tile>
struct OnlineSoftmax {
  static constexpr int kRowTiles = Tile::kRowTiles;
  template <int kTokens>
  using AccS = float[kRowTiles][kTokens / 8][4];
  template <int kTokens>
  using FragP = uint32_t[kRowTiles][kTokens / 16][4];  // P as A operands

  static constexpr float kRescaleThreshold = 8.0f;
  // Whether row_sum is computed by an MMA of P, rounded to the operand type, with ones. Then no P
  // is held in fp32.
  static constexpr bool kRowSumByMma =
      kRowTiles > 1 && !Tile::kPaired && !Tile::kGeneral && !Tile::kFp8;

  float acc_o[kRowTiles][Tile::kWarpDimV / 8][4];
  float row_max[kRowTiles][2];
  float row_sum[kRowTiles][2];  // of this lane's tokens only, until finalize()
  float acc_row_sum[kRowTiles][kRowSumByMma ? 4 : 1];  // accumulators of row_sum, until finalize()

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::kWarpDimV / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc_o[m][n][i] = 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = negative_infinity();
        row_sum[m][half] = 0.0f;
      }
#pragma unroll
      for (float& sum : acc_row_sum[m]) sum = 0.0f;
    }
  }

  // Updates row_max with the scores of a KV block, and rescales if it grows by more than the
  // threshold. Scores times `scale` (> 0) are logits in base 2.
  template <int kMmaN>
  __device__ __forceinline__ void update_max(const float (&acc_s)[kRowTiles][kMmaN][4],
                                             float scale) {
    float block_max[kRowTiles][2];  // of this lane's tokens
    bool grows = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        block_max[m][half] = fmaxf(acc_s[m][0][2 * half], acc_s[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < kMmaN; ++n) {
          block_max[m][half] =
              fmaxf(block_max[m][half], fmaxf(acc_s[m][n][2 * half], acc_s[m][n][2 * half + 1]));
        }
        block_max[m][half] *= scale;
        grows |= block_max[m][half] > row_max[m][half] + kRescaleThreshold;
      }
    }
    if (__any_sync(0xffffffffu, grows)) rescale(block_max);
  }

  // Computes P of that KV block as A operands of type T, and adds it to row_sum.
  template <typename T, int kMmaN>
  __device__ __forceinline__ void exp_scores(const float (&acc_s)[kRowTiles][kMmaN][4], float scale,
                                             uint32_t (&p_frag)[kRowTiles][kMmaN / 2][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float offset = logit_offset(m, half);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kMmaN; ++n) {
          const float x = fast_exp2(fmaf(acc_s[m][n][2 * half], scale, offset));
          const float y = fast_exp2(fmaf(acc_s[m][n][2 * half + 1], scale, offset));
          sum += x + y;
          p_frag[m][n / 2][n % 2 * 2 + half] = pack_pair(T(), x, y);
        }
        row_sum[m][half] += sum;
      }
    }
  }

  // exp_scores() of the 16 tokens of one k step, without row_sum.
  template <typename T, int kMmaN>
  __device__ __forceinline__ void exp_scores_of_step(const float (&acc_s)[kRowTiles][kMmaN][4],
                                                     float scale, int step,
                                                     uint32_t (&p_frag)[kRowTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) {
      const int m = i / 4, half = i % 2;
      const float offset = logit_offset(m, half);
      const float* const pair = acc_s[m][2 * step + i % 4 / 2] + 2 * half;
      p_frag[m][i % 4] = pack_pair(T(), fast_exp2(fmaf(pair[0], scale, offset)),
                                   fast_exp2(fmaf(pair[1], scale, offset)));
    }
  }

  // Takes the maximum of row_max and that of the other warp of a pair. If they differ, rescales
  // acc_o, row_sum, and the P that the other warp sent. Pairs have whole numbers as row_max, so the
  // factors are powers of two and P stays exact.
  template <typename T, int kSteps>
  __device__ __forceinline__ void reduce_max(const float (&peer_max)[kRowTiles][2],
                                             uint32_t (&p_frag)[kRowTiles][kSteps][4]) {
    bool differs = false;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      differs |= row_max[i / 2][i % 2] != peer_max[i / 2][i % 2];
    }
    if (!__any_sync(0xffffffffu, differs)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old_max = row_max[m][half];
        row_max[m][half] = fmaxf(old_max, peer_max[m][half]);
        rescale_row(m, half, exp2_relative(old_max, row_max[m][half]));
        const float factor = exp2_relative(peer_max[m][half], row_max[m][half]);
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
          uint32_t& pair = p_frag[m][n / 2][n % 2 * 2 + half];
          const float2 x = unpack_pair(T(), pair);
          pair = pack_pair(T(), x.x * factor, x.y * factor);
        }
      }
    }
  }

  // Reduces row_sum over the lanes, and the warps of a pair, that share a row.
  __device__ __forceinline__ void finalize(const WarpPair<Tile>& pair) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] = kRowSumByMma ? acc_row_sum[m][2 * half] : quad_sum(row_sum[m][half]);
      }
    }
    if constexpr (Tile::kPaired) pair.reduce_sum(row_sum);
  }

 private:
  // What is added to the logits of a row before exp2: -row_max.
  __device__ __forceinline__ float logit_offset(int m, int half) const {
    return row_max[m][half] == negative_infinity() ? 0.0f : -row_max[m][half];
  }

  // Raises row_max to the maximum of the KV block, and rescales acc_o and row_sum to it. Each row
  // depends on its own tokens only, whatever rows share its warp.
  __device__ __forceinline__ void rescale(const float (&block_max)[kRowTiles][2]) {
    float factors[kRowTiles][2];
    bool is_first = true;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old_max = row_max[m][half], new_max = quad_max(block_max[m][half]);
        if (new_max > old_max + kRescaleThreshold) {
          row_max[m][half] = Tile::kPaired ? ceilf(new_max) : new_max;
        }
        factors[m][half] = exp2_relative(old_max, row_max[m][half]);
        is_first &= old_max == negative_infinity();
      }
    }
    if (__all_sync(0xffffffffu, is_first)) return;  // acc_o and row_sum are still 0
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) rescale_row(m, half, factors[m][half]);
    }
  }

  __device__ __forceinline__ void rescale_row(int m, int half, float factor) {
    row_sum[m][half] *= factor;
    if constexpr (kRowSumByMma) acc_row_sum[m][2 * half] *= factor;
#pragma unroll
    for (int n = 0; n < Tile::kWarpDimV / 8; ++n) {
      acc_o[m][n][2 * half] *= factor;
      acc_o[m][n][2 * half + 1] *= factor;
    }
  }
};

#endif  // __CUDACC__

}  // namespace precast
