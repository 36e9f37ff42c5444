// SPDX-License-Identifier: Apache-2.0
// Random numbers by counter: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as
// easy as 1, 2, 3; SC 2011). Equal keys and counters give equal words on every GPU.
#pragma once

#include "precast/core/types.cuh"

namespace precast {

#if defined(__CUDACC__)

// Four independent words for the counter (x, y, z, w).
__device__ __forceinline__ uint4 philox(uint64_t key, uint4 counter) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xd2511f53u) * counter.x;
    const uint64_t b = uint64_t(0xcd9e8d57u) * counter.z;
    counter = make_uint4(static_cast<uint32_t>(b >> 32) ^ counter.y ^ k0, static_cast<uint32_t>(b),
                         static_cast<uint32_t>(a >> 32) ^ counter.w ^ k1, static_cast<uint32_t>(a));
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return counter;
}

// The upper 24 bits of a word as a number in [0, 1): exact in fp32.
__device__ __forceinline__ float to_uniform(uint32_t word) { return (word >> 8) * 0x1p-24f; }

#endif  // __CUDACC__

}  // namespace precast
