// SPDX-License-Identifier: Apache-2.0
// Prefetches of whole rows into L2, which may overlap the previous grid, and of a line into L1.
#pragma once

#include "precast/core/types.cuh"

namespace precast {

#if defined(__CUDACC__)

// Prefetches `bytes` bytes into L2, as prefetch_to_l2() does for one line. Address and size must be
// multiples of 16. Below compute capability 9.0, where grids do not overlap, it does nothing. Why
// one thread for a row: each line is then requested once, rather than by each of the eight threads
// that load it.
__device__ __forceinline__ void prefetch_bytes_to_l2(const void* source, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}

// Prefetches the line of an address into the L1 cache of the SM. Only behind the wait for the
// previous grid: L1 would keep what was there before.
__device__ __forceinline__ void prefetch_to_l1(const void* source) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(source) : "memory");
}

// CTAs that prefetch data which all CTAs read.
constexpr uint32_t kSharedPrefetches = 8;

#endif  // __CUDACC__

}  // namespace precast
