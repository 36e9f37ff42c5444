// SPDX-License-Identifier: Apache-2.0
// The weight of an element: a probability as it is, or the softmax numerator of a logit.
#pragma once

#include "precast/sampling/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

struct WeightTransform {
  bool is_logits;
  bool is_active;  // row_max and scale_log2 are known: logits become weights
  bool is_stored;  // the elements in shared memory are weights already
  float row_max;
  float scale_log2;  // log2(e) / temperature
  float threshold;   // Weights below it count as 0. It is not negative. A NaN is kept.
};

__device__ __forceinline__ float exp_weight(float x, const WeightTransform& w) {
  return fast_exp2((x - w.row_max) * w.scale_log2);
}

__device__ __forceinline__ float4 exp_weights(float4 x, const WeightTransform& w) {
  return make_float4(exp_weight(x.x, w), exp_weight(x.y, w), exp_weight(x.z, w),
                     exp_weight(x.w, w));
}

// Returns the scale such that exp2((x - row_max) * scale) is the weight at this temperature. At
// temperature 0 only elements equal to the maximum have a weight.
__device__ __forceinline__ float softmax_scale_log2(float temperature) {
  return fminf(__fdiv_rn(kLog2E, temperature), 3.402823466e38f);
}

// An input transform changes the elements of a tile after they were loaded and before they become
// weights: penalties and masks, or a subtraction. This one changes nothing.
struct NoInputTransform {
  static constexpr bool kEnabled = false;
  __device__ __forceinline__ void begin_row(int64_t) {}  // called with the index of the row
  __device__ __forceinline__ bool is_active() const { return false; }
  __device__ __forceinline__ void operator()(int, float (&)[kItemsPerLane]) const {}
};

#endif  // __CUDACC__

}  // namespace precast
