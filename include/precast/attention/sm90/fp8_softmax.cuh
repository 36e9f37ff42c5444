// SPDX-License-Identifier: Apache-2.0
// Online softmax of a warpgroup's rows with P in e4m3: attention/sm90/softmax.cuh says who holds
// what. There is no row sum here: the tensor cores multiply P by a column of ones beside V.
//
// Range  P is 2^(logit - row_max) with a row_max that is kHeadroom lower than the maximum, so that
//        small P keep more of their bits: e4m3 has normal numbers from 2^-6 on, and ends at 448.
#pragma once

#include "precast/attention/sm90/softmax.cuh"

namespace precast {

#if defined(__CUDACC__)

class Fp8Softmax {
 public:
  static constexpr float kHeadroom = 8.0f;
  static constexpr float kLargest = 8.8f;  // P is at most 2^8.8, which is below 448

  float row_max[2] = {negative_infinity(), negative_infinity()};

  // Updates row_max with the scores of a KV block, which times `scale` (> 0) of their row are
  // logits in base 2. Sets what acc_o of the blocks before is multiplied by, and returns whether
  // that differs from 1 for a row of the warp.
  template <int kCount>
  __device__ __forceinline__ bool update_max(const float (&acc_s)[kCount], const float (&scale)[2],
                                             float (&factor)[2]) {
    float block_max[2];
    maximum(acc_s, block_max);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      block_max[half] *= scale[half];
      factor[half] = 1.0f;
    }
    const bool grows = block_max[0] > row_max[0] + kLargest || block_max[1] > row_max[1] + kLargest;
    if (!__any_sync(0xffffffffu, grows)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old_max = row_max[half], new_max = quad_max(block_max[half]);
      if (new_max > old_max + kLargest) row_max[half] = new_max - kHeadroom;
      factor[half] = exp2_relative(old_max, row_max[half]);
    }
    return true;
  }

  // The maxima of this lane's scores of its rows. Why two chains for each row, side by side: an
  // instruction waits for the one before it in its chain.
  template <int kCount>
  static __device__ __forceinline__ void maximum(const float (&acc_s)[kCount], float (&rows)[2]) {
    float x[4] = {acc_s[0], acc_s[1], acc_s[2], acc_s[3]};
#pragma unroll
    for (int i = 4; i < kCount; ++i) x[i % 4] = fmaxf(x[i % 4], acc_s[i]);
    rows[0] = fmaxf(x[0], x[1]);
    rows[1] = fmaxf(x[2], x[3]);
  }

  // Turns scores into P in fp32.
  template <int kCount>
  __device__ __forceinline__ void exp_scores(float (&acc_s)[kCount],
                                             const float (&scale)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = row_max[half] == negative_infinity() ? 0.0f : -row_max[half];
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) {
        acc_s[i] = fast_exp2(fmaf(acc_s[i], scale[half], offset));
        acc_s[i + 1] = fast_exp2(fmaf(acc_s[i + 1], scale[half], offset));
      }
    }
  }
};

// P in fp32 as A operands of wgmma, one for 32 tokens, in the order of V^T
// (attention/sm90/transpose.cuh).
template <int kCount>
__device__ __forceinline__ void pack_fp8_operands(const float (&p)[kCount],
                                                  uint32_t (&operands)[kCount / 16][4]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const int half = i % 2, group = i / 2 * 8;  // columns 2 group .. 2 group + 15
    const float* const low = p + group + 2 * half;
    const float* const high = low + 4;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(operands[i / 4][i % 4])
        : "f"(low[0]), "f"(low[1]), "f"(high[0]), "f"(high[1]));
  }
}

#endif  // __CUDACC__

}  // namespace precast
