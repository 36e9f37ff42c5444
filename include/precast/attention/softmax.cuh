// SPDX-License-Identifier: Apache-2.0
// Softmax over tokens that come in groups: of each row a maximum, a denominator and sums of values,
// all relative to that maximum. The maximum may lag behind: weights then exceed 1, up to 2^kSlack,
// which costs no digits and saves most of the times that sums have to be brought to a new one.
//
// Source   Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867;
//          Dao et al., FlashAttention, arXiv:2205.14135.
#pragma once

#include "precast/attention/query.cuh"
#include "precast/core/math.cuh"

namespace precast {

#if defined(__CUDACC__)

// The largest of the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// 2^(x - top), and 0 for a row that has seen no token.
__device__ __forceinline__ float weight_of(float x, float top) {
  return top == negative_infinity() ? 0.0f : fast_exp2(x - top);
}

// The rows of a warp: lane 4 g + q holds rows g and g + 8 of each m16 tile, and of them the columns
// that core/mma.cuh gives accumulators.
template <typename Tile>
struct RowStates {
  static constexpr int kRowTiles = Tile::kRowTiles;
  template <int kTokens>
  using Scores = float[kRowTiles][kTokens / 8][4];
  template <int kTokens>
  using Weights = uint32_t[kRowTiles][kTokens / 16][4];

  static constexpr float kSlack = 8.0f;
  // Whether weights, rounded as the product with values takes them, are summed by a product with
  // ones: then none of them is held in fp32.
  static constexpr bool kSumsByProduct =
      kRowTiles > 1 && !Tile::kPaired && !Tile::kGeneral && !Tile::kFp8;

  float sums[kRowTiles][Tile::kWarpDimV / 8][4];
  float top[kRowTiles][2];                            // of logits in base 2
  float total[kRowTiles][2];                          // this lane's tokens alone, until finish()
  float products[kRowTiles][kSumsByProduct ? 4 : 1];  // accumulators of totals, until finish()

  __device__ __forceinline__ RowStates() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::kWarpDimV / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[m][half] = negative_infinity();
        total[m][half] = 0.0f;
      }
#pragma unroll
      for (float& product : products[m]) product = 0.0f;
    }
  }

  // A group's scores: times `scale` (> 0) they are logits in base 2. Brings the maxima near them.
  template <int kEights>
  __device__ __forceinline__ void see(const float (&scores)[kRowTiles][kEights][4], float scale) {
    float most[kRowTiles][2];  // of this lane
    bool grows = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most[m][half] = fmaxf(scores[m][0][2 * half], scores[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < kEights; ++n) {
          most[m][half] =
              fmaxf(most[m][half], fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        most[m][half] *= scale;
        grows |= most[m][half] > top[m][half] + kSlack;
      }
    }
    if (__any_sync(0xffffffffu, grows)) raise(most);
  }

  // Takes in that group. Gives the weights of its tokens as operands of the product with values; T
  // is their type.
  template <typename T, int kEights>
  __device__ __forceinline__ void weigh(const float (&scores)[kRowTiles][kEights][4], float scale,
                                        uint32_t (&weights)[kRowTiles][kEights / 2][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = shift_of(m, half);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kEights; ++n) {
          const float x = fast_exp2(fmaf(scores[m][n][2 * half], scale, shift));
          const float y = fast_exp2(fmaf(scores[m][n][2 * half + 1], scale, shift));
          sum += x + y;
          weights[m][n / 2][n % 2 * 2 + half] = pack_pair(T(), x, y);
        }
        total[m][half] += sum;
      }
    }
  }

  // The same of tokens 16 `step` on alone, without a sum of them.
  template <typename T, int kEights>
  __device__ __forceinline__ void weigh_step(const float (&scores)[kRowTiles][kEights][4],
                                             float scale, int step,
                                             uint32_t (&weights)[kRowTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) {
      const int m = i / 4, half = i % 2;
      const float shift = shift_of(m, half);
      const float* const pair = scores[m][2 * step + i % 4 / 2] + 2 * half;
      weights[m][i % 4] = pack_pair(T(), fast_exp2(fmaf(pair[0], scale, shift)),
                                    fast_exp2(fmaf(pair[1], scale, shift)));
    }
  }

  // Takes the other warp's maxima, if they differ; what it gave as weights is then to be brought to
  // the new ones, too. Maxima of pairs are whole numbers, so that costs no digits.
  template <typename T, int kSteps>
  __device__ __forceinline__ void agree(const float (&others)[kRowTiles][2],
                                        uint32_t (&weights)[kRowTiles][kSteps][4]) {
    bool differs = false;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) differs |= top[i / 2][i % 2] != others[i / 2][i % 2];
    if (!__any_sync(0xffffffffu, differs)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = top[m][half];
        top[m][half] = fmaxf(old, others[m][half]);
        scale_row(m, half, weight_of(old, top[m][half]));
        const float factor = weight_of(others[m][half], top[m][half]);
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
          uint32_t& pair = weights[m][n / 2][n % 2 * 2 + half];
          const float2 x = unpack_pair(T(), pair);
          pair = pack_pair(T(), x.x * factor, x.y * factor);
        }
      }
    }
  }

  // The denominators of whole rows.
  __device__ __forceinline__ void finish(const WarpPair<Tile>& pair) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        total[m][half] = kSumsByProduct ? products[m][2 * half] : quad_sum(total[m][half]);
      }
    }
    if constexpr (Tile::kPaired) pair.add(total);
  }

 private:
  // What is added to logits of a row.
  __device__ __forceinline__ float shift_of(int m, int half) const {
    return top[m][half] == negative_infinity() ? 0.0f : -top[m][half];
  }

  // Brings rows to new maxima, each row by its own tokens alone.
  __device__ __forceinline__ void raise(const float (&most)[kRowTiles][2]) {
    float factors[kRowTiles][2];
    bool is_first = true;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = top[m][half], found = quad_max(most[m][half]);
        if (found > old + kSlack) top[m][half] = Tile::kPaired ? ceilf(found) : found;
        factors[m][half] = weight_of(old, top[m][half]);
        is_first &= old == negative_infinity();
      }
    }
    if (__all_sync(0xffffffffu, is_first)) return;  // there are no sums yet
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) scale_row(m, half, factors[m][half]);
    }
  }

  __device__ __forceinline__ void scale_row(int m, int half, float factor) {
    total[m][half] *= factor;
    if constexpr (kSumsByProduct) products[m][2 * half] *= factor;
#pragma unroll
    for (int n = 0; n < Tile::kWarpDimV / 8; ++n) {
      sums[m][n][2 * half] *= factor;
      sums[m][n][2 * half + 1] *= factor;
    }
  }
};

template <typename Tile>
__device__ __forceinline__ int row_of_lane(int m, int half) {
  const int warp = Tile::kNarrow ? 0 : threadIdx.x / (Tile::kPaired ? 64 : 32);
  return (warp * Tile::kRowTiles + m) * 16 + half * 8 + threadIdx.x % 32 / 4;
}

// Scores of tokens that a row does not see by causal mask and window become -inf. `first`: token of
// the group's first score.
template <typename Tile, int kEights>
__device__ __forceinline__ void limit_scores(const AttentionParams& p, const AttentionWork& work,
                                             int32_t first,
                                             float (&scores)[Tile::kRowTiles][kEights][4]) {
  first += threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const AttentionRow row(p, work, row_of_lane<Tile>(m, half));
      const TokenLimits limits(p, work.piece, row.query);
      const int32_t begin = limits.begin - first, end = limits.end - first;
#pragma unroll
      for (int i = 0; i < 2 * kEights; ++i) {
        const int token = i / 2 * 8 + i % 2;
        float& score = scores[m][i / 2][half * 2 + i % 2];
        if (token < begin || token >= end) score = negative_infinity();
      }
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
