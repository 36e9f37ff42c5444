// SPDX-License-Identifier: Apache-2.0
// Online softmax of a warpgroup's rows. A lane holds rows g and g + 8 of its warp's 16 rows; the
// index `half` names them. In an accumulator of wgmma, column pair 8 j + 2 q of row `half` is at
// [4 j + 2 half].
//
// It computes what attention/softmax.cuh computes, but acc_o is rescaled later than row_sum: until
// then it is the accumulator of a wgmma that runs.
#pragma once

#include "precast/attention/softmax.cuh"

namespace precast {

#if defined(__CUDACC__)

class RowStatistics {
 public:
  // row_max may lag behind the true maximum by up to this: see attention/softmax.cuh.
  static constexpr float kRescaleThreshold = 8.0f;

  float row_max[2] = {negative_infinity(), negative_infinity()};
  float row_sum[2] = {0.0f, 0.0f};  // of this lane's columns, until finalize()

  // Updates row_max with the scores of a KV block, which times `scale` (> 0) of their row are
  // logits in base 2. Returns whether the rows of the warp must be rescaled.
  template <int kCount>
  __device__ __forceinline__ bool update_max(const float (&acc_s)[kCount],
                                             const float (&scale)[2]) {
    float block_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = acc_s[2 * half], odd = acc_s[2 * half + 1];
#pragma unroll
      for (int i = 4; i < kCount; i += 4) {
        even = fmaxf(even, acc_s[i + 2 * half]);
        odd = fmaxf(odd, acc_s[i + 2 * half + 1]);
      }
      block_max[half] = fmaxf(even, odd) * scale[half];
    }
    const bool grows = block_max[0] > row_max[0] + kRescaleThreshold ||
                       block_max[1] > row_max[1] + kRescaleThreshold;
    if (!__any_sync(0xffffffffu, grows)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old_max = row_max[half], new_max = quad_max(block_max[half]);
      if (new_max > old_max + kRescaleThreshold) row_max[half] = new_max;
      factor_[half] = exp2_relative(old_max, row_max[half]);
      row_sum[half] *= factor_[half];
    }
    return true;
  }

  // Turns scores into P in fp32 and adds it to row_sum.
  template <int kCount>
  __device__ __forceinline__ void exp_scores(float (&acc_s)[kCount], const float (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = row_max[half] == negative_infinity() ? 0.0f : -row_max[half];
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) {
        acc_s[i] = fast_exp2(fmaf(acc_s[i], scale[half], offset));
        acc_s[i + 1] = fast_exp2(fmaf(acc_s[i + 1], scale[half], offset));
        even += acc_s[i];
        odd += acc_s[i + 1];
      }
      row_sum[half] += even + odd;
    }
  }

  // Rescales acc_o after update_max() has returned true.
  template <int kCount>
  __device__ __forceinline__ void rescale(float (&acc_o)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc_o[i] *= factor_[i / 2 % 2];
  }

  // Sums row_sum over the lanes that share a row.
  __device__ __forceinline__ void finalize() {
    row_sum[0] = quad_sum(row_sum[0]);
    row_sum[1] = quad_sum(row_sum[1]);
  }

 protected:
  float factor_[2];
};

// P in fp32 as A operands of wgmma, one for 16 tokens.
template <typename T, int kCount>
__device__ __forceinline__ void pack_operands(const float (&p)[kCount],
                                              uint32_t (&operands)[kCount / 8][4]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    operands[i / 4][i % 4] = pack_pair(T(), p[2 * i], p[2 * i + 1]);
  }
}

#endif  // __CUDACC__

}  // namespace precast
