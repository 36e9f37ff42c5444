// SPDX-License-Identifier: Apache-2.0
// Reductions over a warp, and exchanges between the lanes of a quad.
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

// Transposes 4x4 words among the four lanes that share a row: lane q gives words[j] and gets the
// word q of lane j.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool is_upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = distance == 1 ? 2 * i : i, high = low + distance;
      const uint32_t received =
          __shfl_xor_sync(0xffffffffu, is_upper ? words[low] : words[high], distance);
      if (is_upper) {
        words[low] = received;
      } else {
        words[high] = received;
      }
    }
  }
}

#endif  // __CUDACC__

}  // namespace precast
