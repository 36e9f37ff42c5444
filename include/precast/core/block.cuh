// SPDX-License-Identifier: Apache-2.0
// Reductions over a CTA, with one barrier each.
#pragma once

#include "precast/core/warp.cuh"

namespace precast {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;

#if defined(__CUDACC__)

// Sum over the CTA. All threads must call it (blockDim.x a multiple of 32, one dimension). The
// result is valid in every thread, and its order of addition is fixed. `scratch` is shared memory
// that only this call uses; reusing it needs a barrier of the caller.
__device__ __forceinline__ float block_sum(float x, float (&scratch)[kMaxWarps]) {
  const int lane = threadIdx.x % kWarpSize;
  x = warp_sum(x);
  if (lane == 0) scratch[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return warp_sum(lane < blockDim.x / kWarpSize ? scratch[lane] : 0.0f);
}

// The same for kCount sums at once, with one barrier.
template <int kCount>
__device__ __forceinline__ void block_sum(float (&x)[kCount], float (&scratch)[kCount][kMaxWarps]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = warp_sum(x[i]);
    if (lane == 0) scratch[i][threadIdx.x / kWarpSize] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = warp_sum(lane < blockDim.x / kWarpSize ? scratch[i][lane] : 0.0f);
  }
}

#endif  // __CUDACC__

}  // namespace precast
