// SPDX-License-Identifier: Apache-2.0
// How elements become weights.
#pragma once

#include "precast/sampling/tile.cuh"

namespace precast {

#if defined(__CUDACC__)

struct Weighing {
  bool logits;
  bool weighed;  // max and factor are known
  bool stored;   // what is on chip are weights
  float max;
  float factor;  // log2(e) / temperature
  float floor;   // not negative: what weighs less, does not count; NaN counts
};

__device__ __forceinline__ float weight_of_logit(float x, const Weighing& w) {
  return fast_exp2((x - w.max) * w.factor);
}

__device__ __forceinline__ float4 weights_of_logits(float4 x, const Weighing& w) {
  return make_float4(weight_of_logit(x.x, w), weight_of_logit(x.y, w), weight_of_logit(x.z, w),
                     weight_of_logit(x.w, w));
}

// exp2((x - max) * factor) is the weight at this temperature; at 0 only the maxima have one.
__device__ __forceinline__ float factor_of(float temperature) {
  return fminf(__fdiv_rn(kLog2E, temperature), 3.402823466e38f);
}

// What is done to a slab's elements as they were read, before they are weighed.
struct NoEdit {
  static constexpr bool kChanges = false;
  __device__ __forceinline__ void start(int64_t) {}  // with the row of this number
  __device__ __forceinline__ bool is_active() const { return false; }
  __device__ __forceinline__ void operator()(int, float (&)[kPerLane]) const {}
};

#endif  // __CUDACC__

}  // namespace precast
