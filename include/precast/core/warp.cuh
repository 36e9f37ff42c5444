// SPDX-License-Identifier: Apache-2.0
// Reductions over a warp.
#pragma once

#include "precast/core/types.cuh"

namespace precast {

constexpr int kWarpSize = 32;

#if defined(__CUDACC__)

// Sum over each aligned group of `lanes` (a power of two) lanes. All 32 lanes must call it. The
// result is valid in every lane, and its order of addition is fixed.
__device__ __forceinline__ float warp_sum(float x, int lanes = kWarpSize) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    if (distance < lanes) x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// The same over the warp for integers.
__device__ __forceinline__ uint32_t warp_sum(uint32_t x) {
  return __reduce_add_sync(0xffffffffu, x);
}

#endif  // __CUDACC__

}  // namespace precast
