// SPDX-License-Identifier: Apache-2.0
// Prefetches of whole rows into L2, while the grid before may still run.
#pragma once

#include "precast/core/types.cuh"

namespace precast {

#if defined(__CUDACC__)

// Asks for the lines of so many bytes in L2, as prefetch_to_l2() does for one; address and bytes
// are multiples of 16. Before compute capability 9.0, where no grid overlaps the one before, it
// does nothing. Why one thread for a row: each line is asked for once, rather than by the eight
// threads that load it.
__device__ __forceinline__ void prefetch_bytes_to_l2(const void* source, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}

// CTAs that prefetch what all of them read.
constexpr uint32_t kSharedPrefetches = 8;

#endif  // __CUDACC__

}  // namespace precast
