// SPDX-License-Identifier: Apache-2.0
// Bulk copies from global to shared memory, which complete on an mbarrier (cp.async.bulk, compute
// capability 9.0).
#pragma once

#include "precast/core/shared_address.cuh"

namespace precast {

#if defined(__CUDACC__)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kArchHasBulkCopy = true;
#else
constexpr bool kArchHasBulkCopy = false;
#endif

// Starts a bulk copy of `bytes`, a multiple of 16, between addresses that are multiples of 16. One
// thread calls it; mbarrier_arrive_expect_tx() must announce the bytes.
__device__ __forceinline__ void cp_async_bulk(uint32_t target, const void* source, uint32_t bytes,
                                              uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

__device__ __forceinline__ void cp_async_bulk(void* target, const void* source, uint32_t bytes,
                                              uint64_t* barrier) {
  cp_async_bulk(shared_address(target), source, bytes, barrier);
}

#endif  // __CUDACC__

}  // namespace precast
